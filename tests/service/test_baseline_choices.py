"""`baseline: auto` over a real database: errors of every candidate, a state that only moves forward."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from service.baselines.selection import CANDIDATES, Selection
from service.batches import bakeoff, choices
from service.batches.scheduler import Scheduler
from service.database.engine import transaction
from tests import training_ground
from tests.conftest import Api
from tests.training_ground import BATCH, HashingEncoder


def batch_rows(engine: Engine) -> list[dict[str, Any]]:
    with transaction(engine) as connection:
        rows = connection.execute(text("SELECT * FROM batches ORDER BY number")).mappings()
        return [dict(row) for row in rows]


def test_every_candidate_s_error_is_stored_with_every_batch(engine: Engine) -> None:
    training_ground.prepare_batches(engine, 3)
    for row in batch_rows(engine):
        assert set(row["candidate_errors"]) == set(CANDIDATES)
        assert row["estimator"] == "gaussian_process"


def test_the_error_of_the_one_in_use_is_that_of_the_stored_advantages(engine: Engine) -> None:
    training_ground.prepare_batches(engine, 2)
    with transaction(engine) as connection:
        measured = connection.execute(
            text("SELECT avg(advantage * advantage) FROM batch_members GROUP BY batch_id ORDER BY batch_id")
        ).scalars()
        for found, row in zip(measured, batch_rows(engine), strict=True):
            assert row["candidate_errors"][row["estimator"]] == pytest.approx(found, rel=1e-12)


def test_the_state_advances_a_batch_at_a_time_and_never_back(engine: Engine) -> None:
    policy = training_ground.prepare_batches(engine, 3)
    with transaction(engine) as connection:
        state = choices.load(connection, policy)
    assert state.batches == 3
    scheduler = Scheduler(engine, HashingEncoder(), interval_seconds=1)
    training_ground.add_rollouts(engine, policy, training_ground.tiny_settings(), BATCH, start=100)
    assert scheduler.tick() == 1
    with transaction(engine) as connection:
        advanced = choices.load(connection, policy)
        members = training_ground.rewarded(connection, policy)
    assert advanced.batches == 4
    late = choices.Formed(1, policy, 2, members, members, Selection())
    choices.observe(engine, late)
    with transaction(engine) as connection:
        assert choices.load(connection, policy) == advanced


def test_a_policy_that_names_an_estimator_keeps_it(engine: Engine) -> None:
    training_ground.prepare_batches(engine, 2, baseline={"estimator": "length_buckets"})
    assert {row["estimator"] for row in batch_rows(engine)} == {"length_buckets"}


def test_a_softmax_waits_for_history(engine: Engine) -> None:
    baseline = {"estimator": "embedding_softmax", "minimum_history": 2 * BATCH}
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
