"""The trainer is killed, loses answers, sleeps past its lease: the chain stays whole (lifecycle.md).

Kill points: ../shared/reference/adapters.md §5.3 as far as they apply to a trainer that publishes
through its database (there is no separate publisher, so nothing to kill after the commit but the
process itself).
"""

import os
import signal
import threading
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from service.adapters import retention
from service.adapters.store import AdapterStore
from service.batches.rewind import rewind
from service.database.engine import transaction
from service.settings import Settings
from tests import training_ground
from tests.faults import worker_process
from tests.faults.worker_process import Fault

BATCHES = 3
LEASE_SECONDS = 1.0


@pytest.fixture
def worker_settings(database_url: str, tmp_path: Path, model_root: Path) -> Settings:
    return Settings(
        database_url=database_url, data=tmp_path / "data", model_root=model_root,
        lease_seconds=LEASE_SECONDS, trainer_interval_seconds=0.05,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """The head adapter's sha256 of the run without faults, once it has been made."""
    return {}


def run(settings: Settings, fault: Fault | None = None) -> int | None:
    process = worker_process.start(settings, fault or Fault(), BATCHES)
    process.join(60)
    return process.exitcode


def head_sha256(engine: Engine, settings: Settings, tmp_path: Path) -> str:
    store = AdapterStore(settings.store_url)
    return training_ground.check_chain(engine, store, BATCHES, tmp_path / "check")


def test_undisturbed_run_is_whole(
    engine: Engine, worker_settings: Settings, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    training_ground.prepare_batches(engine, BATCHES)
    assert run(worker_settings) == 0
    undisturbed["sha256"] = head_sha256(engine, worker_settings, tmp_path)


@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.parametrize(
    "point",
    [
        "lease_taken", "batch_claimed", "rows_built", "stepped", "mid_file", "files_written",
        "before_commit", "committed",
    ],
)  # fmt: skip
def test_killed_anywhere_and_started_again_the_chain_is_that_of_the_undisturbed_run(
    point: str,
    time: int,
    engine: Engine,
    worker_settings: Settings,
    tmp_path: Path,
    undisturbed: dict[str, str],
) -> None:
    if time == 2 and point in ("lease_taken", "mid_file"):
        pytest.skip("reached once a process")
    training_ground.prepare_batches(engine, BATCHES)
    assert run(worker_settings, Fault(point, "kill", time)) == -signal.SIGKILL
    assert run(worker_settings) == 0
    assert head_sha256(engine, worker_settings, tmp_path) == undisturbed["sha256"]


@pytest.mark.parametrize("kind", ["lose_answer", "lose_commit"])
def test_a_commit_whose_answer_is_lost_counts_once(
    kind: str, engine: Engine, worker_settings: Settings, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    training_ground.prepare_batches(engine, BATCHES)
    assert run(worker_settings, Fault("before_commit", kind)) == 0
    assert head_sha256(engine, worker_settings, tmp_path) == undisturbed["sha256"]


def test_a_full_disk_is_not_the_batch_s_fault_and_the_step_is_made_later(
    engine: Engine, worker_settings: Settings, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    training_ground.prepare_batches(engine, BATCHES)
    assert run(worker_settings, Fault("disk_full")) == 0
    assert head_sha256(engine, worker_settings, tmp_path) == undisturbed["sha256"]
    with transaction(engine) as connection:
        assert connection.execute(text("SELECT sum(failures), max(attempts) FROM batches")).one() == (0, 2)


@pytest.mark.parametrize("kind", ["sleep", "sleep_in_transaction"])
def test_a_worker_that_sleeps_past_its_lease_wakes_to_find_its_token_old(
    kind: str, engine: Engine, worker_settings: Settings, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """In a transaction, it holds the lineage's row, which Postgres takes from it after a while."""
    training_ground.prepare_batches(engine, BATCHES)
    sleeper = worker_process.start(worker_settings, Fault("before_commit", kind), BATCHES)
    assert sleeper.pid is not None
    _await_stopped(sleeper.pid)
    assert run(worker_settings) == 0
    whole = head_sha256(engine, worker_settings, tmp_path)
    os.kill(sleeper.pid, signal.SIGCONT)
    _await_sleeping_again(engine)
    sleeper.terminate()  # its lease was lost and it waits for work
    sleeper.join(20)
    assert head_sha256(engine, worker_settings, tmp_path) == whole == undisturbed["sha256"]


@pytest.mark.parametrize("point", ["", "rows_built", "stepped", "before_commit"])
def test_a_step_under_way_when_the_trainer_is_rewound_is_lost_and_the_next_starts_from_there(
    point: str, engine: Engine, worker_settings: Settings, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """Without a point nobody is at work: what a worker started afterwards makes of version 1 is the measure.

    The others are stopped by a signal amid their third step, with version 2 in memory, and woken afterwards.
    """
    policy_id = training_ground.prepare_batches(engine, BATCHES)
    worker = worker_process.start(worker_settings, Fault(point, "sleep", 3), BATCHES if point else 2)
    assert worker.pid is not None
    if point:
        _await_stopped(worker.pid)
    else:
        worker.join(60)
    with transaction(engine) as connection:
        rewind(connection, policy_id, 1, reason="rewind by test")
    assert training_ground.form_batches(engine) == 1  # of the rollouts whose step is lost
    if point:
        os.kill(worker.pid, signal.SIGCONT)
        worker.join(60)
        assert worker.exitcode == 0
    else:
        assert run(worker_settings) == 0
    rows = {row["version"]: row for row in training_ground.chain(engine)}
    assert [(rows[n]["parent"], rows[n]["depth"], rows[n]["rewound"]) for n in (1, 2, 3)] == [
        (0, 1, False), (1, 2, True), (1, 2, False),
    ]  # fmt: skip
    assert undisturbed.setdefault("rewound", rows[3]["adapter_sha256"]) == rows[3]["adapter_sha256"]
    store = AdapterStore(worker_settings.store_url)
    store.download(rows[3]["folder"], tmp_path / "head", with_state=True)
    with transaction(engine) as connection:
        assert connection.execute(text("SELECT DISTINCT state FROM rollouts")).scalars().all() == ["trained"]
        left_behind = retention.orphans(connection, store, policy_id, training_ground.POLICY)
    assert len(left_behind) == bool(point)  # for the garbage collector: no commit can claim it


def _await_stopped(pid: int) -> None:
    """Return once the process is stopped by a signal."""
    for _ in range(6000):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        threading.Event().wait(0.01)
    pytest.fail("the worker never stopped")


def _await_sleeping_again(engine: Engine) -> None:
    """Return once the woken worker has looked for work again, which it does after giving up its step."""
    woken = """SELECT count(*) FROM pg_stat_activity
               WHERE application_name = 'yoro faulty worker' AND query LIKE '%ORDER BY b.created_at%'"""
    for _ in range(3000):
        with transaction(engine) as connection:
            if connection.execute(text(woken)).scalar_one():
                return
        threading.Event().wait(0.01)
    pytest.fail("the woken worker never looked for work")
