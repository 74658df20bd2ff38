"""One LoRA linear layer as one operation: y = x W^T + bias + s (x A^T) B^T.

Knows PEFT's layer, nothing of policies. PEFT's own forward takes four passes over the output in
fp32 and keeps them for backward; this one keeps x and x A^T. Invariants: same formula as PEFT's for
a plain LoRA; the base weight gets no gradient; A and B stay fp32, and are rounded to the base's
type only for the products.

LoRA: Hu et al., arXiv 2106.09685. Deviation: with a bf16 base the products of A and B are in bf16,
as they are where such adapters are served.
"""

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear

from trainer.quantising import dense

ADAPTER = "default"


def fuse(model: torch.nn.Module) -> int:
    """Give every plain LoRA layer over a linear layer, packed or not, the fused forward; return how many."""
    layers = [m for m in model.modules() if isinstance(m, LoraLinear) and _is_plain(m)]
    for layer in layers:
        layer.__class__ = _Fused  # a class, no attribute: torch.compile then compiles it once for all layers
    return len(layers)


def _is_plain(layer: Any) -> bool:
    return (
        (type(layer.base_layer) is torch.nn.Linear or hasattr(layer.base_layer, "quant_state"))
        and not layer.lora_variant
        and layer.active_adapters == [ADAPTER]
        and layer.lora_A[ADAPTER].bias is None
        and layer.lora_B[ADAPTER].bias is None
    )


class _Fused(LoraLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: Any = self.base_layer
        state = getattr(base, "quant_state", None)
        if self.disable_adapters:
            return torch.nn.functional.linear(x, dense(base.weight, state), base.bias)
        a, b = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        apply: Callable[..., torch.Tensor] = _LoraLinear.apply
        flat = x.reshape(-1, x.shape[-1])
        output = apply(flat, base.weight, state, base.bias, a, b, self.scaling[ADAPTER])
        return output.view(*x.shape[:-1], -1)


class _LoraLinear(torch.autograd.Function):
    """With h = s x A^T:  dB = dy^T h,  dh = s dy B,  dA = dh^T x,  dx = dy W + dh A."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        x, weight, state, bias, a, b, scaling = inputs
        low_a, low_b = a.to(x.dtype), b.to(x.dtype)
        h = (x @ low_a.T).mul_(scaling)
        y: torch.Tensor = torch.nn.functional.linear(x, dense(weight, state), bias).addmm_(h, low_b.T)
        ctx.save_for_backward(x, weight, a, b, h)
        ctx.scaling, ctx.state = scaling, state
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, a, b, h = ctx.saved_tensors
        dy = gradients[0]
        dh = (dy @ b.to(dy.dtype)).mul_(ctx.scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ dense(weight, ctx.state)).addmm_(dh, a.to(dy.dtype))
        return dx, None, None, None, (dh.T @ x).to(a.dtype), (dy.T @ h).to(b.dtype), None
