"""The gradient of one micro-batch: forward, gate, backward.

Knows neither batch outcomes nor the optimizer. Invariants: weights and advantages of tokens come in
fixed; gradients add up in the parameters, so that the order and size of micro-batches do not
matter beyond rounding; a rollout's gate is decided over all of its rows, before its backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from service.policies import Objective
from trainer import objective
from trainer.objective import Tokens
from trainer.packing import laid_tokens, lay_out
from trainer.policy import PolicyModel, policy_logprobs
from trainer.scoring import logprobs_of
from trainer.sequences import Row


@dataclass(frozen=True, slots=True)
class Member:
    """A trainable rollout with all that its policy tokens need, [T_i] each, and their weight."""

    rows: tuple[Row, ...]
    sampler: torch.Tensor
    reference: torch.Tensor | None
    advantages: torch.Tensor
    weight: float


@dataclass(frozen=True, slots=True)
class Passed:
    """What a micro-batch leaves behind: detached tokens and entropies on the CPU, sums of losses.

    `kept[j]` says whether rollout `members[j]` passed the gate.
    """

    members: tuple[int, ...]
    tokens: Tokens
    entropy: torch.Tensor
    policy_loss: float
    reference_loss: float
    kept: torch.Tensor


def accumulate(
    policy: PolicyModel,
    group: tuple[int, ...],
    members: Sequence[Member],
    settings: Objective,
    budget: int,
) -> Passed:
    """Add the gradient of the rollouts `group` (indices into `members`).

    A rollout of several rows that exceeds the budget is scored first and goes row by row, so that
    its gate is still that of the whole.
    """
    chosen = [members[i] for i in group]
    rows = [row for m in chosen for row in m.rows]
    # Over a split base every rank makes one pass a micro-batch, however large.
    fits = policy.sharded or laid_tokens(rows, padded=policy.padded) <= budget
    if len(group) > 1 or len(rows) == 1 or fits:
        return _forward_backward(policy, group, chosen, settings)
    kept = _kept(policy, chosen[0], settings, budget)
    parts = [_forward_backward(policy, group, [p], settings, kept) for p in _by_row(chosen[0])]
    return _joined(group, parts, kept)


def _kept(policy: PolicyModel, member: Member, settings: Objective, budget: int) -> torch.Tensor:
    """The gate of one rollout, [1] bool, without a gradient."""
    if not bool(member.sampler.isfinite().any()):
        return torch.ones(1, dtype=torch.bool, device=policy.device)  # every ratio is 1
    current = logprobs_of(policy, dict(enumerate(member.rows)), budget)
    logprobs = torch.cat([current[i] for i in range(len(member.rows))])
    return objective.gate(_tokens([member], logprobs), settings).to(policy.device)


def _forward_backward(
    policy: PolicyModel,
    group: tuple[int, ...],
    chosen: Sequence[Member],
    settings: Objective,
    kept: torch.Tensor | None = None,
) -> Passed:
    """One forward pass over whole rows, and its backward pass unless all are rejected."""
    rows = [row for m in chosen for row in m.rows]
    layout = lay_out(rows, padded=policy.padded, device=policy.device)
    logprobs, entropy = policy_logprobs(policy, layout)
    loss = objective.loss(_tokens(chosen, logprobs), settings, kept)
    if policy.sharded or bool(loss.kept.any()):
        torch.autograd.backward(loss.total)
    return Passed(
        group,
        _tokens(chosen, logprobs.detach().cpu()),
        entropy.cpu(),
        loss.policy.item(),
        loss.reference.item(),
        loss.kept.cpu(),
    )


def _tokens(chosen: Sequence[Member], logprobs: torch.Tensor) -> Tokens:
    counts = [len(m.sampler) for m in chosen]
    weights = [torch.full((c,), m.weight) for c, m in zip(counts, chosen, strict=True)]
    references = [m.reference for m in chosen if m.reference is not None]
    device = logprobs.device
    return Tokens(
        logprobs,
        torch.cat([m.sampler for m in chosen]).to(device),
        torch.cat(references).to(device) if references else None,
        owners(counts).to(device),
        torch.cat([m.advantages for m in chosen]).to(device),
        torch.cat(weights).to(device),
    )


def owners(counts: Sequence[int]) -> torch.Tensor:
    """0 for the first `counts[0]` tokens, 1 for the next `counts[1]`, and so on."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def concatenated(parts: Sequence[Tokens]) -> Tokens:
    """Tokens of several passes in one; owners stay those of each pass."""
    references = [p.reference_logprobs for p in parts if p.reference_logprobs is not None]
    return Tokens(
        torch.cat([p.logprobs for p in parts]),
        torch.cat([p.sampler_logprobs for p in parts]),
        torch.cat(references) if references else None,
        torch.cat([p.owner for p in parts]),
        torch.cat([p.advantages for p in parts]),
        torch.cat([p.weights for p in parts]),
    )


def _by_row(member: Member) -> list[Member]:
    counts = [int(row.loss_mask.sum()) for row in member.rows]
    samplers = torch.split(member.sampler, counts)
    advantages = torch.split(member.advantages, counts)
    references: Sequence[torch.Tensor | None] = [None] * len(counts)
    if member.reference is not None:
        references = torch.split(member.reference, counts)
    return [
        Member((row,), samplers[i], references[i], advantages[i], member.weight)
        for i, row in enumerate(member.rows)
        if counts[i]
    ]


def _joined(group: tuple[int, ...], parts: Sequence[Passed], kept: torch.Tensor) -> Passed:
    return Passed(
        group,
        concatenated([p.tokens for p in parts]),
        torch.cat([p.entropy for p in parts]),
        sum(p.policy_loss for p in parts),
        sum(p.reference_loss for p in parts),
        kept.cpu(),
    )
