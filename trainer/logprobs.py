"""Log-probabilities of chosen tokens from hidden states, without the [tokens x vocabulary] tensor.

Knows no model: hidden states, a frozen output matrix, and what the model does to its logits.
Invariants: logits exist for one chunk of tokens at a time, in fp32; the chunk's size in bytes does
not depend on the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CHUNK_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The frozen last layer: logits = softcap * tanh(scale * (h W^T + bias) / softcap).

    `weight` [V, H], `bias` [V]; `softcap` None: no cap (Gemma 2 has one), `scale` 1: none
    (Cohere multiplies, Granite divides).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


def token_logprobs(
    hidden: torch.Tensor, head: OutputHead, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(target) and the entropy of p, both [M] fp32 in nats; p = softmax(logits / T).

    hidden [M, H], targets [M], temperature [M] > 0. Only the first has a gradient, towards `hidden`
    alone: the head is frozen.
    """
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _TokenLogprobs.apply
    return apply(hidden, head, targets, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """d log p(y) / dh = sum_v (1[v = y] - p_v) * dlogit_v/dz_v / T * scale * W_v.

    A token's log-probability depends on its own hidden state only, so this row of the Jacobian is
    all that backward needs: [M, H], kept from the forward pass while the chunk's logits exist.
    That is as little memory as recomputing the logits in backward, and one matrix product less.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: OutputHead,
        targets: torch.Tensor,
        temperature: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = max(1, CHUNK_BYTES // (4 * head.weight.shape[0]))
        wanted = ctx.needs_input_grad[0]
        weight = _head_weight(head, hidden)
        parts = [
            _chunk(h, head, weight, y, t, wanted=wanted)
            for h, y, t in zip(
                torch.split(hidden, rows),
                torch.split(targets, rows),
                torch.split(temperature, rows),
                strict=True,
            )
        ]
        logprobs, entropy, jacobian = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(jacobian)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (jacobian,) = ctx.saved_tensors
        return jacobian * gradients[0].to(jacobian.dtype)[:, None], None, None, None


def _head_weight(head: OutputHead, hidden: torch.Tensor) -> torch.Tensor:
    # A bf16 logit of 20 is off by up to 0.06, which the divergence gate would see as staleness.
    return head.weight if hidden.is_cuda else head.weight.float()


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply with an fp32 result, whatever the inputs."""
    if a.is_cuda and b.dtype != torch.float32:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    return a.to(b.dtype) @ b


def _chunk(
    hidden: torch.Tensor,
    head: OutputHead,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    *,
    wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = _product(hidden, weight.T)
    if head.bias is not None:
        logits += head.bias
    if head.scale != 1.0:
        logits *= head.scale
    slope = None
    if head.softcap is not None:
        bounded = logits.div_(head.softcap).tanh_()
        slope = 1 - bounded.square() if wanted else None
        logits = bounded * head.softcap
    # In place from here on: this is the largest tensor of the step.
    logits /= temperature[:, None]
    logits -= logits.logsumexp(1, keepdim=True)
    logprobs = logits.gather(1, targets[:, None])
    probabilities = logits.exp()
    entropy = -torch.linalg.vecdot(probabilities, logits)
    if not wanted:
        return logprobs.squeeze(1), entropy, hidden[:, :0]
    slopes = probabilities.neg_()
    slopes.scatter_add_(1, targets[:, None], torch.ones_like(logprobs))
    if slope is not None:
        slopes *= slope
    # In the weight's own type: what comes out is rounded to it in any case, and bf16 is twice as fast.
    jacobian = slopes.to(head.weight.dtype) @ head.weight * (head.scale / temperature)[:, None]
    return logprobs.squeeze(1), entropy, jacobian.to(hidden.dtype)
