"""Plans hold every rollout once and whole; layouts keep every policy token in order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.batches import row
from trainer.packing import laid_tokens, lay_out, micro_batches, shared_prefix
from trainer.sequences import Row

CPU = torch.device("cpu")


@st.composite
def rollouts(draw: st.DrawFn) -> list[list[Row]]:
    """Rollouts of one to three rows, many of which begin alike."""
    return draw(st.lists(st.lists(any_row(), min_size=1, max_size=3), min_size=1, max_size=8))


@st.composite
def any_row(draw: st.DrawFn) -> Row:
    head = draw(st.sampled_from([[], [5] * 12, [5] * 12 + [6] * 20, [7] * 30]))
    tail = draw(st.lists(st.tuples(st.integers(3, 9), st.booleans()), min_size=2, max_size=12))
    ids, mask = [*head, *(i for i, _ in tail)], [False] * len(head) + [m for _, m in tail]
    mask[0] = False
    return row(ids, mask)


@given(members=rollouts(), budget=st.integers(1, 200), padded=st.booleans())
def test_every_rollout_is_whole_in_exactly_one_micro_batch(
    members: list[list[Row]], budget: int, padded: bool
) -> None:
    plan = micro_batches(members, budget, padded=padded)
    assert sorted(i for group in plan for i in group) == list(range(len(members)))


@given(members=rollouts(), budget=st.integers(1, 200), padded=st.booleans())
def test_only_a_rollout_alone_exceeds_the_budget(members: list[list[Row]], budget: int, padded: bool) -> None:
    for group in micro_batches(members, budget, padded=padded):
        rows = [r for i in group for r in members[i]]
        assert laid_tokens(rows, padded=padded) <= budget or len(group) == 1


@given(members=rollouts(), padded=st.booleans())
def test_layout_is_as_large_as_planned(members: list[list[Row]], padded: bool) -> None:
    rows = [r for rows in members for r in rows]
    layout = lay_out(rows, padded=padded, device=CPU)
    assert layout.input_ids.numel() == layout.position_ids.numel() == laid_tokens(rows, padded=padded)


@given(members=rollouts(), padded=st.booleans())
def test_layout_finds_each_policy_token_and_its_predecessor(members: list[list[Row]], padded: bool) -> None:
    rows = [r for rows in members for r in rows]
    layout = lay_out(rows, padded=padded, device=CPU)
    places = [r.loss_mask.nonzero().flatten() for r in rows]
    before = [r.input_ids[p - 1] for r, p in zip(rows, places, strict=True)]
    assert torch.equal(layout.targets, torch.cat([r.input_ids[r.loss_mask] for r in rows]))
    assert torch.equal(layout.input_ids.flatten()[layout.sources], torch.cat(before))
    assert torch.equal(layout.position_ids.flatten()[layout.sources], torch.cat(places) - 1)


@given(members=rollouts())
def test_segments_cover_the_rows_after_their_prefix(members: list[list[Row]]) -> None:
    rows = [r for rows in members for r in rows]
    layout = lay_out(rows, padded=False, device=CPU)
    rests = [len(r.input_ids) - layout.prefix for r in rows]
    assert layout.segments == ((layout.prefix, *rests) if layout.prefix else tuple(rests))
    assert min(rests) > 0


def test_prefix_ends_before_the_first_policy_token_of_any_row() -> None:
    ids = list(range(10, 40))
    rows = [row(ids, [t >= start for t in range(30)]) for start in (25, 20)]
    assert shared_prefix(rows) == 20
    assert shared_prefix([rows[0], row(ids[:12] + [9] * 18, [False] * 30)]) == 12


def test_short_prefixes_are_not_shared() -> None:
    ids = [*range(10, 16), 3, 4, 5, 6]
    assert shared_prefix([row(ids, [False] * 10), row([*ids[:6], 7, 7, 7], [False] * 9)]) == 0
    assert shared_prefix([row(ids, [False] * 10)]) == 0


def test_rollouts_that_begin_alike_go_together() -> None:
    def member(head: int, tail: int) -> list[Row]:
        return [row([head] * 50 + [tail] * 5, [False] * 50 + [True] * 5)]

    members = [member(5, 6), member(9, 6), member(5, 7), member(9, 7)]
    assert micro_batches(members, 1000, padded=False) == [(0, 2), (1, 3)]
    assert micro_batches(members, 59, padded=False) == [(0,), (2,), (1,), (3,)]


def test_padded_rollouts_of_similar_length_go_together() -> None:
    members = [[row([4] * length, [False] * length)] for length in (3, 50, 4, 48)]
    assert micro_batches(members, 100, padded=True) == [(1, 3), (0, 2)]
