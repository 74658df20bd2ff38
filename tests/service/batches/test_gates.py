"""The gates one by one: what a rollout waits for, what excludes it, what a changed rule does."""

import threading
from typing import Any

import pytest
from sqlalchemy import Engine

from service.batches import gates
from service.database import policies
from service.database.engine import transaction
from service.ingest.writer import Writer
from service.schemas import GradeAccepted
from tests.service.batches.ground import maintained, make_ground


def test_criteria_make_the_value_by_their_weights_in_the_grader_s_range(engine: Engine) -> None:
    ground = make_ground(engine, reward={"criteria": {"tone": 1, "facts": 3}, "value_range": [0, 10]})
    ground.trace("t")
    ground.grade("t", 10, criteria={"tone": 10, "facts": 2, "other": 1})
    assert ground.reward("t") == pytest.approx((10 + 3 * 2) / 40)


@pytest.mark.parametrize(
    "criteria",
    [
        {"tone": 1},
        {"tone": 1, "facts": "good"},
        {"tone": 1, "facts": 11},
        {"tone": 1, "facts": None, "note": "nul \u0000 inside"},
        {"tone": 1, "facts": 1e300},
        {"tone": 1, "facts": [1]},
    ],
)
def test_a_grade_that_does_not_state_every_criterion_keeps_its_own_value(
    engine: Engine, criteria: dict[str, Any]
) -> None:
    ground = make_ground(engine, reward={"criteria": {"tone": 1, "facts": 3}, "value_range": [0, 10]})
    ground.trace("t")
    ground.grade("t", 5, criteria=criteria)
    assert ground.reward("t") == 0.5


def test_a_changed_rule_reaches_rollouts_that_are_not_batched_and_never_trained_ones(engine: Engine) -> None:
    ground = make_ground(engine)
    for trace_id in ("a1", "a2", "b1"):
        ground.trace(trace_id)
        ground.grade(trace_id, 0.0 if trace_id == "a1" else 1.0, "a")
        ground.grade(trace_id, 0.5, "b")
    assert ground.form() == 1
    assert ground.train() == 1
    ground.revise(reward={"rule": "min"})
    assert [ground.reward(trace_id) for trace_id in ("a1", "a2", "b1")] == [0.25, 0.75, 0.5]
    ((revision, used),) = ground.rows(
        "SELECT reward_revision, cardinality(reward_grades) FROM rollouts"
        " WHERE policy_id = :policy AND trace_id = 'b1'"
    )
    assert (revision, used) == (2, 2)


def test_a_change_that_no_gate_reads_evaluates_nothing_again(engine: Engine) -> None:
    ground = make_ground(engine)
    ground.trace("t")
    ground.grade("t", 1.0)
    ground.revise(optimizer={"learning_rate": 1e-4})
    with ground.connection() as connection:
        assert not gates.is_outdated(connection, ground.policy_id)


def test_a_writer_that_raced_with_a_rule_change_is_put_right(engine: Engine) -> None:
    """It evaluates under the old rule, and commits after the change, which passed by the row it holds."""
    ground = make_ground(engine)
    ground.trace("t")
    ground.grade("t", 0.0, "a")
    new = ground.new_grade("t", 1.0, "b")
    evaluated, changed = threading.Event(), threading.Event()

    def hold() -> None:
        evaluated.set()
        assert changed.wait(30)

    racing = threading.Thread(target=Writer(engine, before_commit=hold).write, args=([new],))
    racing.start()
    assert evaluated.wait(30)
    with transaction(engine) as connection:
        policies.revise(connection, ground.policy_id, {"reward": {"rule": "min"}})
        gates.evaluate_policy(connection, ground.policy_id)
    changed.set()
    racing.join(30)
    assert ground.reward("t") == 0.5, "it was evaluated under the old rule"
    with transaction(engine) as connection:
        assert gates.is_outdated(connection, ground.policy_id), "and no batch is formed of it"
    ground.tidy()
    assert ground.reward("t") == 0.0


def test_failed_rollouts_follow_the_settings_and_keep_their_reward_as_history(engine: Engine) -> None:
    ground = make_ground(engine)
    ground.trace("t", status="failed")
    ground.grade("t", 0.25)
    assert ground.states()["t"] == ("excluded", "failed_rollout")
    assert ground.reward("t") == 0.25
    ground.revise(statuses={"failed": "train"})
    assert ground.states()["t"] == ("ready", "")


def test_what_waits_too_long_expires_and_a_longer_limit_takes_it_back(engine: Engine) -> None:
    ground = make_ground(engine, reward={"expire_seconds": 1000})
    ground.trace("t")
    ground.pass_time(999)
    ground.tidy()
    assert ground.states()["t"] == ("waiting_reward", "no_grade")
    ground.pass_time(2)
    ground.tidy()
    assert ground.states()["t"] == ("excluded", "expired")
    late = ground.grade("t", 1.0)
    assert isinstance(late, GradeAccepted)
    assert late.effect == "late"
    assert ground.reward("t") == 1.0, "it serves baselines as history"
    ground.revise(reward={"expire_seconds": 5000})
    assert ground.states()["t"] == ("ready", "")


def test_grades_whose_trace_never_came_are_given_up_and_counted(engine: Engine) -> None:
    ground = make_ground(engine, reward={"grade_expire_seconds": 1000})
    ground.grade("t", 1.0)
    ground.pass_time(1001)
    ground.tidy()
    assert ground.rows("SELECT id FROM rollouts WHERE policy_id = :policy") == []
    ground.trace("t")
    assert ground.states()["t"] == ("waiting_reward", "no_grade")


def test_grades_that_came_too_late_for_a_batch_count_when_it_is_dissolved(engine: Engine) -> None:
    ground = make_ground(engine, batching={"size": 2, "max_staleness": 0, "max_ready_batches": 2})
    for number in range(4):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number % 2)
    assert [ground.form(), ground.form()] == [1, 1]
    late = ground.grade("t2", None)
    assert isinstance(late, GradeAccepted)
    assert late.effect == "late"
    assert ground.train() == 1
    lease, batch = ground.claim()
    assert batch is None, "the second batch went stale"
    assert lease is not None
    assert ground.states()["t2"] == ("waiting_reward", "no_grade")
    assert ground.states()["t3"] == ("ready", "")


def test_every_late_grade_of_one_rollout_is_counted_when_several_are_written_at_once(engine: Engine) -> None:
    ground = make_ground(engine)
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number)
    assert ground.form() == 1
    late = [ground.new_grade(trace_id, 0.5, grader) for trace_id, grader in (("t0", "b"), ("t1", "b"))]
    late += [ground.new_grade("t0", 0.5, "c"), ground.new_grade("t0", 0.5, "c")]  # the last is a duplicate
    Writer(engine).write(late)
    assert ground.rows("SELECT late_grades FROM rollouts WHERE policy_id = :policy ORDER BY trace_id") == [
        (2,), (1,),
    ]  # fmt: skip
    with ground.connection() as connection:
        assert maintained(connection, ground.policy_id)["late_grades", "", -1] == 3


def test_rollouts_of_a_version_rewound_away_are_off_branch(engine: Engine) -> None:
    ground = make_ground(engine)
    ground.trace("t")
    ground.grade("t", 1.0)
    with ground.connection() as connection:
        ground_rows = "UPDATE policy_versions SET rewound = true WHERE policy_id = :policy"
        connection.exec_driver_sql(ground_rows.replace(":policy", str(ground.policy_id)))
        gates.open_epoch(connection, ground.policy_id)
        gates.evaluate_policy(connection, ground.policy_id)
    assert ground.states()["t"] == ("excluded", "off_branch")
    assert ground.reward("t") == 1.0


def test_the_worked_example_of_the_documentation_is_true(engine: Engine) -> None:
    ground = make_ground(
        engine,
        reward={
            "rule": "weighted", "weights": {"tests": 1, "expert": 3}, "require": ["expert"],
            "criteria": {"tone": 1, "facts": 3}, "wait_seconds": 600, "settle_seconds": 60,
            "value_range": [0, 10],
        },
    )  # fmt: skip
    first = ground.grade("t1", 8, "tests")
    assert isinstance(first, GradeAccepted)
    assert first.effect == "waiting_for_trace"
    ground.pass_time(120)
    ground.trace("t1")
    assert ground.states()["t1"] == ("waiting_reward", "missing:expert")
    ground.pass_time(180)
    ground.grade("t1", 4, "expert", criteria={"tone": 10, "facts": 2}, graded_at="2026-01-01T12:05:00Z")
    assert ground.states()["t1"] == ("waiting_reward", "waiting_for_graders")
    ground.pass_time(270)
    ground.grade("t1", 4, "expert", criteria={"tone": 10, "facts": 6}, graded_at="2026-01-01T12:09:30Z")
    ground.pass_time(31)
    ground.tidy()
    assert ground.states()["t1"] == ("waiting_reward", "settling")
    ground.pass_time(30)
    ground.tidy()
    assert ground.states()["t1"] == ("ready", "")
    assert ground.reward("t1") == pytest.approx(0.725)
