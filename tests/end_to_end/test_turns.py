"""Rewards of single turns from the API to an adapter."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from service.adapters.store import AdapterStore
from service.batches import leases
from service.database.engine import transaction
from service.settings import Settings
from tests import training_ground
from tests.conftest import Api
from tests.tiny_model import write_tiny_model
from tests.training_ground import BATCH
from trainer.heartbeat import Heartbeat
from trainer.restore import Restorer
from trainer.worker import Worker


@pytest.fixture
def worker(engine: Engine, database_url: str, tmp_path: Path) -> Worker:
    write_tiny_model(tmp_path / "models" / "tiny")
    settings = Settings(
        database_url=database_url, data=tmp_path / "data", model_root=tmp_path / "models",
    )  # fmt: skip
    store = AdapterStore(settings.store_url)
    return Worker(engine, store, settings, "worker", Restorer(store, settings))


def post(api: Api, policy: str, *, with_turns: bool) -> None:
    """Four conversations of two turns, with the same rewards whatever the policy's name."""
    for number in range(BATCH):
        named = {"policy": policy, "trace_id": f"t{number}"}
        messages: list[dict[str, Any]] = []
        for turn in (1, 2):
            messages.append({"role": "user", "content": f"task {number}, step {turn}"})
            messages.append({"role": "assistant", "content": f"answer {number * 7919 % 101}"})
        assert api.post_trace({**named, "policy_version": 0, "messages": messages}).status_code == 201
        values: list[tuple[float, dict[str, int]]] = [(number / BATCH, {})]
        if with_turns:
            values += [(0.9 - 0.2 * number, {"turn": 1}), (0.1 + 0.2 * number, {"turn": 3})]
        for value, where in values:
            grade = {**named, "grader": "g", "value": value, **where}
            assert api.post_reward(grade).status_code == 201


def step(worker: Worker, policy_id: int) -> str:
    """Form the policy's batch, train it, return the adapter's sha256."""
    assert training_ground.form_batches(worker.engine) == 1
    lease = leases.claim(worker.engine, policy_id, "worker", 60.0)
    assert lease is not None
    with Heartbeat(worker.engine, lease, 60.0) as heartbeat:
        assert worker.train_next(lease, heartbeat)
    leases.release(worker.engine, lease)
    with transaction(worker.engine) as connection:
        return str(
            connection.execute(
                text("SELECT adapter_sha256 FROM policy_versions WHERE policy_id = :id AND version = 1"),
                {"id": policy_id},
            ).scalar_one()
        )


def test_turns_posted_over_the_api_move_the_adapter_and_only_where_they_weigh(
    api: Api, engine: Engine, worker: Worker
) -> None:
    made = {}
    for name, weight, with_turns in (("bare", 0.0, False), ("off", 0.0, True), ("on", 1.0, True)):
        objective = {"gate": "none", "expected_tokens": 4, "turn_weight": weight}
        policy = training_ground.make_policy(engine, training_ground.tiny_settings(objective=objective), name)
        post(api, name, with_turns=with_turns)
        made[name] = step(worker, policy)
    assert made["bare"] == made["off"] != made["on"]

    shown = [api.call("reader", "GET", f"/v1/traces/t{n}?policy=on").json() for n in range(BATCH)]
    told = [turn for story in shown for turn in story["batches"][0]["turns"]]
    assert [(turn["turn"], turn["note"]) for turn in told] == [(1, ""), (3, "")] * BATCH
    assert all(turn["advantage"] == turn["reward"] - turn["baseline"] for turn in told)
    assert api.call("reader", "GET", "/v1/traces/t0?policy=off").json()["batches"][0]["turns"] == []
    with transaction(engine) as connection:
        figures = connection.execute(text("SELECT metrics FROM batches ORDER BY id")).scalars().all()
    assert "turns/graded" not in figures[1]
    assert (figures[2]["turns/graded"], figures[2]["turns/without_tokens"]) == (2 * BATCH, 0)
