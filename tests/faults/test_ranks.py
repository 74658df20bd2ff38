"""One trainer in two processes: the chain is the single process's, and a rank that is gone ends the other."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy import Engine

from service.adapters.store import AdapterStore
from service.database import engine as database
from service.database.embedded import EmbeddedPostgres
from service.settings import Settings
from tests import training_ground
from tests.databases import fresh_database
from tests.faults import worker_process
from tests.faults.worker_process import Fault
from tests.trainer.batches import distance
from trainer.checkpoint import WEIGHTS

BATCHES = 3
NONE = Fault()


@pytest.fixture
def worker_settings(database_url: str, tmp_path: Path, model_root: Path) -> Settings:
    return Settings(
        database_url=database_url, data=tmp_path / "data", model_root=model_root,
        lease_seconds=1.0, trainer_interval_seconds=0.05, rank_seconds=30.0,
    )  # fmt: skip


def run(settings: Settings, *faults: Fault) -> list[int | None]:
    ranks = worker_process.start_ranks(settings, faults, BATCHES)
    for process in ranks:
        process.join(60)
    return [process.exitcode for process in ranks]


def head(engine: Engine, settings: Settings, scratch: Path) -> dict[str, torch.Tensor]:
    store = AdapterStore(settings.store_url)
    training_ground.check_chain(engine, store, BATCHES, scratch)
    folder = training_ground.chain(engine)[-1]["folder"]
    found: dict[str, Any] = load_file(scratch / folder / WEIGHTS)
    return found


def prepare(engine: Engine) -> None:
    """Batches of several micro-batches each, of older versions than the head, without logprobs."""
    training_ground.prepare_batches(
        engine, BATCHES, sequences={"precision": "fp32", "max_tokens": 256, "token_budget": 64},
        objective={"gate": "none", "expected_tokens": 4, "reference_kl": 0.1},
        baseline={"estimator": "leave_one_out"},
    )  # fmt: skip


@pytest.fixture
def prepared(engine: Engine) -> Engine:
    prepare(engine)
    return engine


@pytest.mark.parametrize("shard_base", [False, True])
def test_two_ranks_make_the_chain_of_one_process(
    shard_base: bool, prepared: Engine, worker_settings: Settings, tmp_path: Path, postgres: EmbeddedPostgres
) -> None:
    several = worker_settings.model_copy(update={"shard_base": shard_base})
    assert run(several, NONE, NONE) == [0, 0]
    together = head(prepared, several, tmp_path / "together")
    with fresh_database(postgres) as url:
        engine = database.connect(url, name="test")
        prepare(engine)
        single = Settings(**worker_settings.model_dump() | {"database_url": url, "data": tmp_path / "single"})
        process = worker_process.start(single, NONE, BATCHES)
        process.join(60)
        assert process.exitcode == 0
        alone = head(engine, single, tmp_path / "alone")
        engine.dispose()
    assert distance(together, alone) < 1e-4


@pytest.mark.parametrize("kind", ["kill", "sleep"])
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_rank_that_dies_or_hangs_ends_the_other_and_a_new_start_completes_the_chain(
    faulty: int, kind: str, prepared: Engine, worker_settings: Settings, tmp_path: Path
) -> None:
    fault = Fault("stepped" if faulty == 0 else "mid_forward", kind, 2)
    short = worker_settings.model_copy(update={"rank_seconds": 3.0 if kind == "sleep" else 30.0})
    ranks = worker_process.start_ranks(short, [fault, NONE] if faulty == 0 else [NONE, fault], BATCHES)
    other = ranks[1 - faulty]
    other.join(60)
    assert other.exitcode == 1
    ranks[faulty].kill()
    ranks[faulty].join()
    assert ranks[faulty].exitcode == -signal.SIGKILL
    assert run(worker_settings, NONE, NONE) == [0, 0]
    head(prepared, worker_settings, tmp_path / "check")
