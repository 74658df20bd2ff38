"""Rows into micro-batches: which rollouts go together, and how their tokens lie in memory.

Knows no model. Pure: same rows and budget, same plan. Invariants: a micro-batch holds whole
rollouts, so that a rollout's gate is known from one forward pass; every row is in exactly one
micro-batch; no weight or denominator is decided here.

Rows of one agent often begin alike (system prompt, tools). Laid end to end, what all rows of a
micro-batch begin with lies there once, and is computed once:

    prefix | rest of row 0 | rest of row 1 | ...
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.sequences import Row

_LEAST_SHARED = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Tokens of some rows, ready for the model, and where their policy tokens are.

    `input_ids` and `position_ids` are [1, N] when rows lie end to end; then `segments` are the
    lengths of the parts, the first of them the shared prefix if `prefix` is not 0. Else they are
    [rows, longest], padded on the right, where a causal model needs no mask, and `segments` is None.
    `sources` [M] are flat positions whose hidden states predict the policy tokens `targets` [M];
    `temperature` and `sampler_logprobs` [M] go with them, in the order of the rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: tuple[int, ...] | None
    prefix: int
    sources: torch.Tensor
    targets: torch.Tensor
    temperature: torch.Tensor
    sampler_logprobs: torch.Tensor


def micro_batches(rollouts: Sequence[Sequence[Row]], budget: int, *, padded: bool) -> list[tuple[int, ...]]:
    """Group rollouts, each given by its rows, into at most `budget` tokens; the answer has indices.

    A rollout that exceeds the budget is alone. Rollouts join while that costs no more tokens than
    staying apart: end to end they go in the order of their ids, so that those which begin alike
    meet; padded, in the order of their lengths.
    """
    if padded:
        order = sorted(range(len(rollouts)), key=lambda i: (-max(len(r.input_ids) for r in rollouts[i]), i))
    else:
        order = sorted(range(len(rollouts)), key=lambda i: (rollouts[i][0].input_ids.tolist(), i))
    plan: list[list[int]] = []
    for index in order:
        joined = [*plan[-1], index] if plan else []
        limit = budget
        if plan and not padded:
            apart = [laid_tokens(_rows(rollouts, group), padded=False) for group in (plan[-1], [index])]
            limit = min(budget, sum(apart))
        if joined and laid_tokens(_rows(rollouts, joined), padded=padded) <= limit:
            plan[-1] = joined
        else:
            plan.append([index])
    return [tuple(sorted(members)) for members in plan]


def _rows(rollouts: Sequence[Sequence[Row]], group: Sequence[int]) -> list[Row]:
    return [row for i in group for row in rollouts[i]]


def laid_tokens(rows: Sequence[Row], *, padded: bool) -> int:
    """How many tokens the model computes for these rows together."""
    lengths = [len(row.input_ids) for row in rows]
    if padded:
        return max(lengths) * len(lengths)
    return sum(lengths) - (len(lengths) - 1) * shared_prefix(rows)


def shared_prefix(rows: Sequence[Row]) -> int:
    """Tokens that all rows begin with and none of them trains; 0 where sharing is not worth it."""
    first = rows[0].input_ids
    shared = min(_untrained(row) for row in rows)
    for row in rows[1:]:
        different = (row.input_ids[:shared] != first[:shared]).nonzero()
        shared = int(different[0]) if len(different) else shared
    return shared if len(rows) > 1 and shared >= _LEAST_SHARED else 0


def _untrained(row: Row) -> int:
    """Tokens before the first policy token, and never the whole row."""
    places = row.loss_mask.nonzero()
    return int(places[0]) if len(places) else len(row.input_ids) - 1


def lay_out(rows: Sequence[Row], *, padded: bool, device: torch.device) -> Layout:
    """Lay rows end to end after their shared prefix, or one below the other with `padded`."""
    lengths = [len(row.input_ids) for row in rows]
    prefix = 0 if padded else shared_prefix(rows)
    ids, positions = _below(rows, lengths) if padded else _end_to_end(rows, lengths, prefix)
    rests = [length - prefix for length in lengths]
    # Where a row's token 0 would lie if the prefix were part of it.
    starts = [i * max(lengths) for i in range(len(rows))] if padded else _offsets(rests)
    chosen = [row.loss_mask.nonzero().squeeze(1) for row in rows]
    assert all(not len(places) or places[0] > 0 for places in chosen), "nothing predicts token 0"
    sources = [
        torch.where(places - 1 < prefix, places - 1, places - 1 + start)
        for places, start in zip(chosen, starts, strict=True)
    ]
    return Layout(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        segments=None if padded else (prefix, *rests) if prefix else tuple(lengths),
        prefix=prefix,
        sources=torch.cat(sources).to(device),
        targets=_gather([row.input_ids for row in rows], chosen, device),
        temperature=_gather([row.temperature for row in rows], chosen, device),
        sampler_logprobs=_gather([row.sampler_logprobs for row in rows], chosen, device),
    )


def _below(rows: Sequence[Row], lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : lengths[i]] = row.input_ids
    return ids, torch.arange(max(lengths)).expand(len(rows), -1)


def _end_to_end(
    rows: Sequence[Row], lengths: Sequence[int], prefix: int
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [rows[0].input_ids[:prefix], *(row.input_ids[prefix:] for row in rows)]
    positions = [torch.arange(prefix), *(torch.arange(prefix, length) for length in lengths)]
    return torch.cat(ids)[None], torch.cat(positions)[None]


def _offsets(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _gather(
    values: Sequence[torch.Tensor], places: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    return torch.cat([v[p] for v, p in zip(values, places, strict=True)]).to(device)
