"""Rows into micro-batches: which rollouts go together, and how their tokens lie in memory.

Knows no model. Pure: same rows and budget, same plan. Invariants: a micro-batch holds whole
rollouts, so that a rollout's gate is known from one forward pass; every row is in exactly one
micro-batch; no weight or denominator is decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.sequences import Row


@dataclass(frozen=True, slots=True)
class Layout:
    """Tokens of some rows, ready for the model, and where their policy tokens are.

    `input_ids` and `position_ids` are [1, N] with `segments` (the rows' lengths) when rows lie end
    to end, else [rows, longest], padded on the right, where a causal model needs no mask.
    `sources` [M] are flat positions whose hidden states predict the policy tokens `targets` [M];
    `temperature` and `sampler_logprobs` [M] go with them, in the order of the rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: tuple[int, ...] | None
    sources: torch.Tensor
    targets: torch.Tensor
    temperature: torch.Tensor
    sampler_logprobs: torch.Tensor


def micro_batches(
    row_lengths: Sequence[Sequence[int]], budget: int, *, padded: bool
) -> list[tuple[int, ...]]:
    """Group rollouts by their rows' lengths, the longest first, into at most `budget` tokens.

    `row_lengths[i]` are those of rollout i; the answer holds indices i. A rollout that exceeds the
    budget is alone. With `padded`, a row costs as much as the longest in its micro-batch.
    """
    order = sorted(range(len(row_lengths)), key=lambda i: (-max(row_lengths[i]), i))
    plan: list[list[int]] = []
    for index in order:
        if plan and _cost([row_lengths[i] for i in (*plan[-1], index)], padded) <= budget:
            plan[-1].append(index)
        else:
            plan.append([index])
    return [tuple(sorted(members)) for members in plan]


def _cost(rollouts: Sequence[Sequence[int]], padded: bool) -> int:
    lengths = [length for rows in rollouts for length in rows]
    return max(lengths) * len(lengths) if padded else sum(lengths)


def lay_out(rows: Sequence[Row], *, padded: bool, device: torch.device) -> Layout:
    """Lay rows end to end, or one below the other with `padded`."""
    lengths = [len(row.input_ids) for row in rows]
    width = max(lengths)
    starts = [i * width for i in range(len(rows))] if padded else _offsets(lengths)
    if padded:
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : lengths[i]] = row.input_ids
        positions = torch.arange(width).expand(len(rows), width)
    else:
        ids = torch.cat([row.input_ids for row in rows])[None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
    chosen = [row.loss_mask.nonzero().squeeze(1) for row in rows]
    assert all(not len(places) or places[0] > 0 for places in chosen), "nothing predicts token 0"
    sources = [places + start - 1 for places, start in zip(chosen, starts, strict=True)]
    return Layout(
        ids.to(device),
        positions.to(device),
        None if padded else tuple(lengths),
        torch.cat(sources).to(device),
        _gather([row.input_ids for row in rows], chosen, device),
        _gather([row.temperature for row in rows], chosen, device),
        _gather([row.sampler_logprobs for row in rows], chosen, device),
    )


def _offsets(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _gather(
    values: Sequence[torch.Tensor], places: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    return torch.cat([v[p] for v, p in zip(values, places, strict=True)]).to(device)
