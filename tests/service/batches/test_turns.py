"""Rewards of single turns in a batch: read at assembly, stored, shown, taken back with what they rest on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import Engine

from service.batches import stories
from service.batches.scheduler import Scheduler
from service.batches.stories import Steps
from service.batches.turns import TURNS_TAUGHT, obstacle
from tests.service.batches.ground import Ground, make_ground
from tests.training_ground import HashingEncoder

ON = {"objective": {"turn_weight": 0.5}}


def conversation(trace_id: str, turns: int = 2) -> list[dict[str, Any]]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{trace_id} asks {turn}"})
        messages.append({"role": "assistant", "content": f"{trace_id} says {turn}"})
    return messages


def post(ground: Ground, turns: int = 2, **rewards: float) -> None:
    """Traces by id with a reward each, all of two turns."""
    for trace_id, reward in rewards.items():
        ground.trace(trace_id, messages=conversation(trace_id, turns))
        ground.grade(trace_id, reward)


def turns_of(ground: Ground, batch: int = 1) -> dict[tuple[str, int], Any]:
    rows = ground.rows(
        "SELECT r.trace_id, t.* FROM batch_turns t JOIN rollouts r ON r.id = t.rollout_id"
        " JOIN batches b ON b.id = t.batch_id WHERE r.policy_id = :policy AND b.number = :batch",
        batch=batch,
    )
    return {(row.trace_id, row.turn): row for row in rows}


def test_turns_are_rewarded_by_the_mean_of_their_graders_and_compared_across_rollouts(engine: Engine) -> None:
    ground = make_ground(engine, **ON)
    post(ground, a=0.0, b=1.0)
    for grader, value in (("x", 0.2), ("y", 0.6), ("rogue", 1.0), ("sorry", 1.0)):
        ground.grade("a", value, grader, turn=1)
    ground.grade("a", None, "sorry", turn=1)
    ground.grade("a", 1.0, "x", turn=1, name="tone")
    ground.grade("b", 0.9, "x", turn=1)
    ground.grade("b", 0.7, "x", turn=3)
    ground.quarantine("rogue")
    assert ground.form() == 1
    found = turns_of(ground)
    assert {key: pytest.approx(row.reward) for key, row in found.items()} == {
        ("a", 1): 0.4, ("b", 1): 0.9, ("b", 3): 0.7,
    }  # fmt: skip
    assert found["a", 1].baseline == pytest.approx(0.8)
    assert found["b", 1].baseline == found["b", 3].baseline == pytest.approx(0.4)
    assert found["b", 3].advantage == pytest.approx(0.3)
    _, batch = ground.claim()
    assert batch is not None
    assert [member.turns for member in batch.members] == [
        {1: found["a", 1].advantage},
        {1: found["b", 1].advantage, 3: found["b", 3].advantage},
    ]


def test_off_by_default_and_the_rollouts_own_numbers_do_not_change(engine: Engine) -> None:
    numbers = []
    for settings in ({}, ON):
        ground = make_ground(engine, baseline={"estimator": "auto"}, **settings)
        post(ground, a=0.0, b=1.0)
        ground.grade("a", 0.3, turn=1)
        assert ground.form() == 1
        numbers.append(
            ground.rows(
                "SELECT m.reward, m.baseline, m.advantage FROM batch_members m JOIN batches b"
                " ON b.id = m.batch_id WHERE b.policy_id = :policy ORDER BY m.position"
            )
        )
        assert len(turns_of(ground)) == (1 if settings else 0)
    assert numbers[0] == numbers[1]


def test_a_grade_of_a_turn_makes_no_rollout_ready(engine: Engine) -> None:
    ground = make_ground(engine, **ON)
    ground.trace("a", messages=conversation("a"))
    ground.grade("a", 1.0, turn=1)
    assert ground.states()["a"] == ("waiting_reward", "no_grade")


def test_what_teaches_nothing_is_stored_with_the_reason(engine: Engine) -> None:
    ground = make_ground(engine, **ON)
    ids = {"prompt_token_ids": [5], "completion_token_ids": [6]}
    calls = [{"message_index": index, **ids} for index in (1, 3, 3)]
    ground.trace("a", messages=conversation("a"), calls=calls)
    ground.grade("a", 0.0)
    post(ground, TURNS_TAUGHT + 1, b=1.0)
    for turn in (0, 1, 3, 99):
        ground.grade("a", 0.5, turn=turn)
    for turn in range(TURNS_TAUGHT + 1):
        ground.grade("b", 0.5, turn=2 * turn + 1)
    assert ground.form() == 1
    notes = {key: row.note for key, row in turns_of(ground).items() if row.note}
    assert notes == {
        ("a", 0): "not_sampled", ("a", 3): "several_calls", ("a", 99): "not_sampled",
        ("b", 2 * TURNS_TAUGHT + 1): "over_limit",
    }  # fmt: skip
    assert {row.advantage for row in turns_of(ground).values() if row.note} == {None}
    _, batch = ground.claim()
    assert batch is not None
    assert [list(member.turns) for member in batch.members] == [[1], list(range(1, 2 * TURNS_TAUGHT, 2))]


def test_a_batch_whose_turns_alone_say_something_goes_to_the_trainer(engine: Engine) -> None:
    for turn_reward, state in ((0.5, "no_step"), (0.6, "ready")):
        ground = make_ground(engine, **ON)
        post(ground, a=0.5, b=0.5)
        ground.grade("a", 0.5, turn=1)
        ground.grade("b", turn_reward, turn=1)
        assert ground.form() == 1
        assert [row.state for row in ground.rows("SELECT state FROM batches WHERE policy_id = :policy")] == [
            state
        ]


def test_a_story_shows_turns_and_which_grades_counted(engine: Engine) -> None:
    ground = make_ground(engine, **ON)
    post(ground, a=0.0, b=1.0)
    ground.grade("a", 0.3, turn=1)
    assert ground.form() == 1
    ground.grade("a", 0.9, "late", turn=3)
    with ground.connection() as connection:
        told = stories.story(connection, ground.policy_id, "a", Steps())
    assert told["batches"][0]["turns"] == [
        {"turn": 1, "reward": 0.3, "baseline": 0.5, "advantage": pytest.approx(-0.2), "note": ""}
    ]
    assert [(grade["turn"], grade["counts"], grade["late"]) for grade in told["grades"]] == [
        (None, True, False), (1, True, False), (3, False, True),
    ]  # fmt: skip


def test_a_quarantine_reaches_batches_that_rest_on_grades_of_turns(engine: Engine) -> None:
    ground = make_ground(engine, batching={"size": 2, "max_ready_batches": 3}, **ON)
    for first, second in (("a", "b"), ("c", "d"), ("e", "f")):
        post(ground, **{first: 0.0, second: 1.0})
        ground.grade(first, 0.3, "rogue" if first != "a" else "good", turn=1)
        assert ground.form() == 1
    assert [ground.train(), ground.train()] == [1, 2]
    done = ground.quarantine("rogue")
    assert (done.tainted_versions, done.dissolved_batches) == ([2], [3])
    assert ground.form() == 1
    assert turns_of(ground, 4) == {}


def test_a_batch_being_trained_when_a_turn_s_grader_is_quarantined_makes_a_tainted_version(
    engine: Engine,
) -> None:
    ground = make_ground(engine, **ON)
    post(ground, a=0.0, b=1.0)
    ground.grade("a", 0.3, "rogue", turn=1)
    assert ground.form() == 1
    lease, batch = ground.claim()
    assert batch is not None
    ground.quarantine("rogue")
    assert ground.commit(lease, batch) == 1
    (row,) = ground.rows("SELECT tainted FROM policy_versions WHERE policy_id = :policy AND version = 1")
    assert row.tainted == ["quarantined grader rogue"]


def test_erasure_removes_the_vectors_of_turns_and_leaves_only_numbers(engine: Engine) -> None:
    ground = make_ground(engine, **ON)
    post(ground, a=0.0, b=1.0)
    ground.grade("a", 0.3, turn=3)
    ground.grade("b", 0.4, turn=1)
    assert ground.form() == 1
    count = "SELECT count(*) AS n FROM embeddings WHERE encoder = :encoder"
    assert ground.rows(count, encoder=HashingEncoder.name)[0].n == 4  # two rollouts, two turns
    ground.erase("a")
    assert ground.rows(count, encoder=HashingEncoder.name)[0].n == 2
    left = ground.rows(
        "SELECT t.* FROM batch_turns t JOIN batches b ON b.id = t.batch_id WHERE b.policy_id = :policy"
    )
    assert [(row.turn, row.reward, row.note) for row in left] == [(3, 0.3, ""), (1, 0.4, "")]


class GradingMeanwhile(HashingEncoder):
    """Somebody grades a turn while the texts of the first look are being embedded."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self._ground.grade("a", 0.3, turn=1)
        return super().encode(texts)


def test_a_turn_graded_after_the_look_is_embedded_at_the_next_one(engine: Engine) -> None:
    """The batch waits for the vector instead of being formed without the turn."""
    ground = make_ground(engine, **ON)
    post(ground, a=0.0, b=1.0)
    scheduler = Scheduler(engine, GradingMeanwhile(ground), interval_seconds=1)
    assert scheduler.form(ground.policy_id) is None
    assert scheduler.form(ground.policy_id) is not None
    assert list(turns_of(ground)) == [("a", 1)]


def called(index: int, **ids: list[int]) -> dict[str, Any]:
    return {"message_index": index, **ids}


IDS = {"prompt_token_ids": [5], "completion_token_ids": [6]}


@pytest.mark.parametrize(
    ("calls", "turn", "expected"),
    [
        ([], 1, ""),
        ([], 3, ""),
        ([], 0, "not_sampled"),
        ([], 4, "not_sampled"),
        ([called(3)], 1, "not_sampled"),  # part of the prompt
        ([called(3), called(3)], 3, ""),  # without ids the template locates it
        ([called(1, **IDS), called(3, **IDS)], 3, ""),
        ([called(1, **IDS), called(3)], 3, "no_token_ids"),
        ([called(1, **IDS)], 3, "no_token_ids"),
        ([called(1, **IDS), called(3, **IDS), called(3, **IDS)], 3, "several_calls"),
    ],
)
def test_tokens_of_a_turn_are_told_only_where_that_is_certain(
    calls: list[dict[str, Any]], turn: int, expected: str
) -> None:
    assert obstacle({"messages": conversation("t"), "calls": calls}, turn) == expected
