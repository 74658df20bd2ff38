"""`baseline: auto` over a real database: errors of every candidate, a state that only moves forward."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from service.baselines.selection import CANDIDATES, Selection
from service.batches import bakeoff, choices, outcomes
from service.database.engine import transaction
from tests import training_ground
from tests.conftest import Api
from tests.service.batches.ground import Ground, make_ground

AUTO = {"baseline": {"estimator": "auto"}, "batching": {"size": 2, "max_ready_batches": 10}}


def batch_rows(engine: Engine) -> list[dict[str, Any]]:
    with transaction(engine) as connection:
        rows = connection.execute(text("SELECT * FROM batches ORDER BY number")).mappings()
        return [dict(row) for row in rows]


def post(ground: Ground, rewards: dict[str, float]) -> None:
    for trace_id, reward in rewards.items():
        said = [("user", f"task {trace_id}"), ("assistant", "done")]
        ground.trace(trace_id, messages=[{"role": role, "content": content} for role, content in said])
        ground.grade(trace_id, reward)


def state_of(ground: Ground) -> Selection:
    with ground.connection() as connection:
        return choices.load(connection, ground.policy_id)


def test_every_candidate_s_error_is_stored_with_every_batch(engine: Engine) -> None:
    training_ground.prepare_batches(engine, 3)
    for row in batch_rows(engine):
        assert set(row["candidate_errors"]) == set(CANDIDATES)
        assert row["estimator"] == "gaussian_process"


def test_the_error_of_the_one_in_use_is_that_of_the_stored_advantages(engine: Engine) -> None:
    """Where nothing else waits: rollouts of an earlier batch, trained, are history of both."""
    ground = make_ground(engine, **AUTO)
    for number in range(3):
        post(ground, {f"t{number}a": number / 4, f"t{number}b": 1 - number / 3})
        assert ground.form() == 1
        ground.train()
    measured = ground.rows(
        "SELECT avg(m.advantage * m.advantage) AS error, b.candidate_errors, b.estimator"
        " FROM batch_members m JOIN batches b ON b.id = m.batch_id GROUP BY b.id ORDER BY b.id"
    )
    assert len(measured) == 3
    for row in measured:
        assert row.candidate_errors[row.estimator] == pytest.approx(row.error, rel=1e-12)


def test_the_state_learns_from_a_batch_once_it_has_ended(engine: Engine) -> None:
    """And from each one once, whichever scheduler looks and however often."""
    ground = make_ground(engine, **AUTO)
    post(ground, {f"t{number}": number / 5 for number in range(6)})
    assert [ground.form() for _ in range(4)] == [1, 1, 1, 0]
    assert state_of(ground) == Selection()
    ground.train()
    for scheduler in (ground.scheduler, ground.fresh_scheduler(), ground.scheduler):
        scheduler._advance(ground.policy_id)
        assert state_of(ground).batches == 1
    ground.train()
    ground.train()
    ground.scheduler._advance(ground.policy_id)
    assert state_of(ground).batches == 3
    assert [set(errors) for errors in state_of(ground).errors] == [set(CANDIDATES)] * 3
    assert state_of(ground).parameters["gaussian_process"]["noise"] > 0


def last_baselines(ground: Ground, rewards: dict[str, float], *, dissolve: bool) -> list[float]:
    """Baselines of the last two rollouts, which waited while earlier batches were scored and fitted to.

    With `dissolve` they were in batches themselves, which came to nothing.
    """
    post(ground, rewards)
    for _ in range(len(rewards) // 2 - 1):
        assert ground.form() == 1
        if dissolve:
            assert ground.form() == 1
            (newest,) = ground.rows("SELECT max(id) AS id FROM batches WHERE state = 'ready'")
            with transaction(ground.engine) as connection:
                outcomes.dissolve(connection, newest.id, "member_erased")
        ground.train()
    assert ground.form() == 1
    assert state_of(ground).batches == len(rewards) // 2 - 1
    rows = ground.rows(
        "SELECT baseline FROM batch_members WHERE batch_id = (SELECT max(id) FROM batches) ORDER BY position"
    )
    return [row.baseline for row in rows]


@pytest.mark.parametrize("dissolve", [False, True])
def test_neither_fit_nor_choice_lets_a_reward_reach_its_own_baseline(engine: Engine, dissolve: bool) -> None:
    rewards = {f"t{number}": (number * 37 % 11) / 10 for number in range(10)}
    changed = {**rewards, "t8": 1.0 - rewards["t8"]}
    made = [
        last_baselines(make_ground(engine, **AUTO), each, dissolve=dissolve) for each in (rewards, changed)
    ]
    assert made[0][0] == made[1][0], "its own reward is not there"
    assert made[0][1] != made[1][1], "the other member's baseline knows it, or the test would show nothing"


def test_a_policy_that_names_an_estimator_keeps_it(engine: Engine) -> None:
    training_ground.prepare_batches(engine, 2, baseline={"estimator": "length_buckets"})
    assert {row["estimator"] for row in batch_rows(engine)} == {"length_buckets"}


def test_a_softmax_waits_for_history(engine: Engine) -> None:
    baseline = {"estimator": "embedding_softmax", "minimum_history": 2 * training_ground.BATCH}
    training_ground.prepare_batches(engine, 4, baseline=baseline)
    used = [row["estimator"] for row in batch_rows(engine)]
    assert used[-1] == "leave_one_out" or "embedding_softmax" in used


def test_auto_uses_what_its_state_has_chosen(engine: Engine) -> None:
    policy = training_ground.prepare_batches(engine, 1)
    with transaction(engine) as connection:
        state = replace(choices.load(connection, policy), chosen="tfidf_softmax")
    settings = training_ground.tiny_settings().baseline
    assert choices.estimator(settings, state, 0).name == "tfidf_softmax"


def test_the_bakeoff_ranks_by_the_errors_that_were_logged(engine: Engine, api: Api) -> None:
    policy = training_ground.prepare_batches(engine, 4)
    with transaction(engine) as connection:
        connection.execute(
            text(
                """UPDATE batches SET candidate_errors = '{"leave_one_out": 0.2, "ema": 0.1, "zero": 0.4}'"""
            )
        )
        found = bakeoff.compare(connection, policy, batches=10)
    assert [(entry.estimator, entry.ratio) for entry in found] == [
        ("ema", pytest.approx(2.0)), ("leave_one_out", 1.0), ("zero", pytest.approx(0.5)),
    ]  # fmt: skip
    shown = api.call("dashboard", "GET", "/v1/policies/tiny/baselines").json()
    assert [entry["estimator"] for entry in shown["baselines"]] == ["ema", "leave_one_out", "zero"]
    assert shown["in_use"] == "gaussian_process"
