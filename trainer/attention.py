"""Causal attention over rows laid end to end, without padding, after a prefix that all share.

Knows nothing of rollouts. Registered with transformers under `NAME`, so that any decoder that looks
its attention up by name can use it. A row sees the prefix and itself, never another row.
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
    prefix: int = 0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each row.

    query [1, heads, N, d], key and value [1, kv_heads, N, d]; `segments` are lengths that sum to N
    (None: one row), the first of them the shared prefix's if `prefix` is not 0. Returns
    [1, N, heads, d]. Raises NotImplementedError for variants that a plain causal row cannot
    express, so that nothing is silently left out.

    On a CPU bf16 attends in fp32: backward in bf16 takes three times as long there (torch 2.13),
    and loses direction.
    """
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(f"attention with {name} cannot be laid end to end")
    assert attention_mask is None
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    lengths = list(segments or (query.shape[2],))
    queries, keys, values = (torch.split(t, lengths, 2) for t in (query, key, value))
    mask = _after_prefix(max(lengths), prefix, query.device) if prefix else None
    rows = [
        _causal(q, k, v, None, scaling)
        if mask is None or i == 0
        else _causal(q, torch.cat([keys[0], k], 2), torch.cat([values[0], v], 2), mask, scaling)
        for i, (q, k, v) in enumerate(zip(queries, keys, values, strict=True))
    ]
    return torch.cat(rows, 2).transpose(1, 2).to(dtype).contiguous(), None


def _after_prefix(longest: int, prefix: int, device: torch.device) -> torch.Tensor:
    """Who sees whom in a row that follows the prefix, [longest, prefix + longest] bool."""
    own = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    return torch.cat([torch.ones(longest, prefix, dtype=torch.bool, device=device), own], 1)


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    mask = None if mask is None else mask[: q.shape[2], : k.shape[2]]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


AttentionInterface.register(NAME, attend)
