"""One LoRA linear layer as one operation: y = x W^T + bias + s (x A^T) B^T.

Knows PEFT's layer, nothing of policies. PEFT's own forward takes four passes over the output in
fp32 and keeps them for backward; this one keeps x and x A^T. Invariants: same formula as PEFT's for
a plain LoRA; the base weight gets no gradient; A and B stay fp32, and are rounded to the base's
type only for the products.

LoRA: Hu et al., arXiv 2106.09685. Deviation: with a bf16 base the products of A and B are in bf16,
as they are where such adapters are served.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear

ADAPTER = "default"


def fuse(model: torch.nn.Module) -> int:
    """Give every plain LoRA layer over a plain linear layer the fused forward; return how many."""
    layers = [m for m in model.modules() if isinstance(m, LoraLinear) and _is_plain(m)]
    for layer in layers:
        layer.__dict__["forward"] = partial(_forward, layer)
    return len(layers)


def _is_plain(layer: Any) -> bool:
    return (
        type(layer.base_layer) is torch.nn.Linear
        and not layer.lora_variant
        and layer.active_adapters == [ADAPTER]
        and layer.lora_A[ADAPTER].bias is None
        and layer.lora_B[ADAPTER].bias is None
    )


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    base = layer.base_layer
    if layer.disable_adapters:
        return torch.nn.functional.linear(x, base.weight, base.bias)
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    apply: Callable[..., torch.Tensor] = _LoraLinear.apply
    flat = x.reshape(-1, x.shape[-1])
    output = apply(flat, base.weight, base.bias, a, b, layer.scaling[ADAPTER])
    return output.view(*x.shape[:-1], -1)


class _LoraLinear(torch.autograd.Function):
    """With h = s x A^T:  dB = dy^T h,  dh = s dy B,  dA = dh^T x,  dx = dy W + dh A."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        x, weight, bias, a, b, scaling = inputs
        low_a, low_b = a.to(x.dtype), b.to(x.dtype)
        h = (x @ low_a.T).mul_(scaling)
        y: torch.Tensor = torch.nn.functional.linear(x, weight, bias).addmm_(h, low_b.T)
        ctx.save_for_backward(x, weight, a, b, h)
        ctx.scaling = scaling
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, a, b, h = ctx.saved_tensors
        dy = gradients[0]
        dh = (dy @ b.to(dy.dtype)).mul_(ctx.scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight).addmm_(dh, a.to(dy.dtype))
        return dx, None, None, (dh.T @ x).to(a.dtype), (dy.T @ h).to(b.dtype), None
