"""The worker over a real database and a tiny model: what a step leaves in tables, metrics and on a screen."""

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from rich.console import Console
from sqlalchemy import Engine, text

from service.adapters.store import AdapterStore
from service.batches import leases
from service.database import policies
from service.database.engine import transaction
from service.settings import Settings
from tests import training_ground
from tests.trainer.test_tracking import Keeping
from tests.training_ground import BATCH, POLICY
from trainer.heartbeat import Heartbeat
from trainer.progress import Progress
from trainer.restore import Restorer
from trainer.tracking import Tracking
from trainer.worker import Worker

# reference/algorithms.md §4.2; `skipped_reason` is the batch's outcome, `adapter_sha` the version's,
# `sampler_adapter_sha_seen` each member's version; `policy_version` is the version's row.
FIGURES = """
    n_traj n_rows n_tokens reward/mean reward/std reward/min reward/max
    baseline/mean baseline/std baseline/n_eff_p10 baseline/fallback_frac
    adv/mean adv/absmean adv/std adv/frac_zero staleness/mean staleness/max staleness/dropped n_versions
    kl_sample_train_v1 kl_sample_train_v2 is/mean is/min is/max is/ess is/trunc_frac is/gate_reject_frac
    kl_ref entropy loss/pg loss/kl grad_norm update_norm lora_norm lr tok_per_s peak_mem seconds
"""


@pytest.fixture
def worker(engine: Engine, database_url: str, tmp_path: Path, tiny_folder: Path) -> Worker:
    shutil.copytree(tiny_folder, tmp_path / "models" / "tiny")
    settings = Settings(
        database_url=database_url, data=tmp_path / "data", model_root=tmp_path / "models",
    )  # fmt: skip
    store = AdapterStore(settings.store_url)
    return Worker(engine, store, settings, "worker", Restorer(store, settings))


def train(worker: Worker, policy: int, times: int = 1) -> None:
    """Claim and finish batches."""
    lease = leases.claim(worker.engine, policy, "worker", 60.0)
    assert lease is not None
    with Heartbeat(worker.engine, lease, 60.0) as heartbeat:
        for _ in range(times):
            worker.train_next(lease, heartbeat)


def rows(engine: Engine, statement: str) -> list[Any]:
    with transaction(engine) as connection:
        return list(connection.execute(text(statement)).all())


def drawn(progress: Progress) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(progress)
    return console.export_text().strip()


def test_every_figure_of_a_step_is_stored_exported_and_reported(worker: Worker, engine: Engine) -> None:
    policy = training_ground.prepare_batches(engine, 2)
    keeping, seen = Keeping(), []
    worker = Worker(
        engine, worker.store, worker.settings, "worker", worker.restorer,
        at=lambda point: seen.append(drawn(worker.progress)) if point == "stepped" else None,
        tracking=Tracking({"keeping": keeping}),
    )  # fmt: skip
    train(worker, policy, 2)
    worker.tracking.close()
    stored = [row.metrics for row in rows(engine, "SELECT metrics FROM batches ORDER BY number")]
    assert [sorted(set(FIGURES.split()) - set(metrics)) for metrics in stored] == [[], []]
    # the second batch was sampled by the base as well, which is one step behind by then
    assert [metrics["staleness/max"] for metrics in stored] == [0.0, 1.0]
    assert stored[1]["baseline/n_eff_p10"] > 1
    labels = {"policy": POLICY, "figure": "reward/mean"}
    assert REGISTRY.get_sample_value("yoro_step_figure", labels) == stored[1]["reward/mean"]
    trained = {"policy": POLICY, "outcome": "trained"}
    assert (REGISTRY.get_sample_value("yoro_trained_rollouts_total", trained) or 0) >= 2 * BATCH
    assert keeping.batches == [1, 2, -1]
    assert f"training  {POLICY} batch 1" in seen[0]
    assert "4/4 rows" in seen[0]
    assert f"[last] {POLICY} batch 1: trained, reward 0." in seen[1]
    assert drawn(worker.progress).startswith("waiting for a batch  [last]")


def test_a_batch_of_which_every_rollout_fails_alone_pauses_and_excludes_nobody(
    worker: Worker, engine: Engine
) -> None:
    policy = training_ground.prepare_batches(engine, 1)

    def broken(*_: Any) -> None:
        raise RuntimeError("the weights are gone")

    model = worker.restorer.base(training_ground.tiny_settings())
    model.base.base_model.register_forward_hook(broken)
    train(worker, policy, 3)
    (row,) = rows(engine, "SELECT paused, paused_code, paused_reason FROM policies")
    assert (row.paused, row.paused_code) == (True, "failing_batch")
    assert "every rollout fails alone" in row.paused_reason
    assert "the weights are gone" in row.paused_reason
    assert rows(engine, "SELECT DISTINCT state FROM rollouts") == [("batched",)]
    assert rows(engine, "SELECT code FROM alerts") == [("failing_batch",)]


def test_a_batch_that_killed_ten_trainers_pauses_and_is_tried_again_after_resume(
    worker: Worker, engine: Engine
) -> None:
    policy = training_ground.prepare_batches(engine, 1)
    with transaction(engine) as connection:
        connection.execute(text("UPDATE batches SET deaths = 10"))
    train(worker, policy)
    assert rows(engine, "SELECT paused_code FROM policies") == [("trainer_deaths",)]
    with transaction(engine) as connection:
        policies.set_paused(connection, policy, False)
    train(worker, policy)
    assert rows(engine, "SELECT state FROM batches") == [("trained",)]
