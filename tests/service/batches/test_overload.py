"""More ready rollouts than batches: which ones stay is a matter of age or of a hash, never of reward."""

import pytest
from sqlalchemy import Engine

from tests.service.batches.ground import Ground, make_ground


def overloaded(engine: Engine, take: str, rewards: list[float]) -> Ground:
    ground = make_ground(
        engine, batching={"size": 2, "max_ready_batches": 1, "overload": {"take": take, "backlog_batches": 2}}
    )
    for number, reward in enumerate(rewards):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", reward)
    ground.tidy()
    return ground


def ready(ground: Ground) -> set[str]:
    return {trace_id for trace_id, (state, _) in ground.states().items() if state == "ready"}


REWARDS = [0.0, 1.0, 0.5, 0.25, 0.75, 1.0, 0.0]


@pytest.mark.parametrize(
    ("take", "kept"), [("oldest", {"t0", "t1", "t2", "t3"}), ("newest", {"t3", "t4", "t5", "t6"})]
)
def test_the_excess_becomes_not_sampled_by_age(engine: Engine, take: str, kept: set[str]) -> None:
    ground = overloaded(engine, take, REWARDS)
    assert ready(ground) == kept
    assert {ground.states()[f"t{n}"] for n in range(7)} == {("ready", ""), ("excluded", "not_sampled")}


def test_a_sample_is_chosen_by_hash_whatever_the_rewards(engine: Engine) -> None:
    one = overloaded(engine, "sample", REWARDS)
    kept = ready(one)
    assert len(kept) == 4
    assert kept not in ({"t0", "t1", "t2", "t3"}, {"t3", "t4", "t5", "t6"})
    one.revise(reward={"rule": "min"})  # readmitted by the change, and left out again the same way
    one.tidy()
    assert ready(one) == kept
    for trace_id in kept:
        one.grade(trace_id, 0.125)
    one.tidy()
    assert ready(one) == kept


def test_newest_first_means_that_batches_take_the_newest(engine: Engine) -> None:
    ground = overloaded(engine, "newest", REWARDS)
    assert ground.form() == 1
    assert {t for t, (state, _) in ground.states().items() if state == "batched"} == {"t5", "t6"}


def test_a_wider_backlog_takes_back_what_was_left_out(engine: Engine) -> None:
    ground = overloaded(engine, "oldest", REWARDS)
    ground.revise(batching={"overload": {"backlog_batches": 3}})
    ground.tidy()
    assert len(ready(ground)) == 6
