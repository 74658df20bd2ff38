"""Causal attention over rows laid end to end, without padding.

Knows nothing of rollouts. Registered with transformers under `NAME`, so that any decoder that looks
its attention up by name can use it; a row never sees another row.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "yoro_rows"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    segments: tuple[int, ...] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each segment.

    query [1, heads, N, d], key and value [1, kv_heads, N, d]; `segments` are the rows' lengths, in
    order, summing to N (None: one row). Returns [1, N, heads, d]. Raises NotImplementedError for
    variants that a plain causal row cannot express, so that nothing is silently left out.

    A bf16 CPU attends in fp32: PyTorch's bf16 CPU kernels lose most of the gradient's direction
    here, and attention over short rows is a small part of the work.
    """
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(f"attention with {name} cannot be laid end to end")
    assert attention_mask is None
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    lengths = list(segments or (query.shape[2],))
    rows = [
        scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        for q, k, v in zip(
            torch.split(query, lengths, 2),
            torch.split(key, lengths, 2),
            torch.split(value, lengths, 2),
            strict=True,
        )
    ]
    return torch.cat(rows, 2).transpose(1, 2).to(dtype).contiguous(), None


AttentionInterface.register(NAME, attend)
