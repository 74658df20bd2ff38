"""Trainers killed, stopped past their lease and cut off at random moments: the chain stays whole.

Each run starts from a copy of one database of ready batches, so that all of them can be compared with
an undisturbed run: versions, the rollouts that each trained, the bytes of each adapter.

`YORO_TRAINER_KILLS` (10 in `make test`, 50 in `make soak-trainer`), `YORO_TRAINER_VERSIONS` (20) and
`YORO_TRAINER_OUTAGE_SECONDS` (2; 60 in the soak) say how far it goes. The seed is printed;
`YORO_TRAINER_SEED` repeats the choices, though not the machine's timing.
"""

import os
import random
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text

from service.adapters.store import AdapterStore
from service.database import engine as database
from service.database.embedded import EmbeddedPostgres
from service.database.engine import transaction
from service.settings import Settings
from tests import training_ground
from tests.databases import fresh_database, unreachable
from tests.faults import worker_process
from tests.faults.worker_process import Fault

KILLS = int(os.environ.get("YORO_TRAINER_KILLS", "10"))
VERSIONS = int(os.environ.get("YORO_TRAINER_VERSIONS", "20"))
OUTAGE_SECONDS = float(os.environ.get("YORO_TRAINER_OUTAGE_SECONDS", "2"))
SEED = int(os.environ.get("YORO_TRAINER_SEED") or secrets.randbelow(1 << 32))
LEASE_SECONDS = 0.5
ROUNDS = 6
FOREVER = 1 << 30
pytestmark = pytest.mark.timeout(120 + 10 * KILLS + 2 * OUTAGE_SECONDS)

BEFORE_THE_COMMIT = (
    "lease_taken", "batch_claimed", "rows_built", "stepped", "mid_file", "files_written", "before_commit",
)  # fmt: skip

Lineage = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Ground:
    """A database of ready batches of its own, and workers over it."""

    engine: Engine
    settings: Settings
    folder: Path

    def start(self, fault: Fault | None = None, until_head: int = FOREVER) -> Any:
        """Start a worker that stops by itself at a head."""
        return worker_process.start(self.settings, fault or Fault(), until_head)

    def finish(self) -> None:
        """Run one more worker to the end, if this is not it."""
        if self.head() < VERSIONS:
            worker = self.start(until_head=VERSIONS)
            worker.join(120)
            assert worker.exitcode == 0

    def head(self) -> int:
        """The newest version."""
        return int(self.row().head_version)

    def row(self) -> Any:
        """The policy's lineage."""
        with transaction(self.engine) as connection:
            return connection.execute(text("SELECT head_version, holder FROM lineages")).one()

    def lineage(self) -> Lineage:
        """Check that the chain is whole; return every version with its adapter and its rollouts."""
        store = AdapterStore(self.settings.store_url)
        training_ground.check_chain(self.engine, store, VERSIONS, self.folder / "check")
        with transaction(self.engine) as connection:
            rows = connection.execute(
                text("""SELECT v.version, v.parent, v.adapter_sha256,
                               array_agg(r.trace_id || ':' || m.advantage ORDER BY r.trace_id)
                        FROM policy_versions v
                        JOIN batch_members m ON m.batch_id = v.batch_id AND m.live
                        JOIN rollouts r ON r.id = m.rollout_id
                        GROUP BY v.policy_id, v.version ORDER BY v.version""")
            ).all()
        return [tuple(row) for row in rows]


@pytest.fixture(scope="module")
def template(postgres: EmbeddedPostgres) -> Iterator[str]:
    """Name of a database in which `VERSIONS` batches wait."""
    print(f"\nYORO_TRAINER_SEED={SEED}")
    with fresh_database(postgres) as url:
        engine = database.connect(url, name="preparation")
        training_ground.prepare_batches(engine, VERSIONS, baseline={"estimator": "leave_one_out"})
        engine.dispose()
        yield str(make_url(url).database)


MakeGround = Callable[[], Any]


@pytest.fixture(scope="module")
def ground(
    postgres: EmbeddedPostgres, template: str, model_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> MakeGround:
    """Make a ground of its own for each caller."""

    @contextmanager
    def make() -> Iterator[Ground]:
        folder = tmp_path_factory.mktemp("ground")
        with fresh_database(postgres, template) as url:
            engine = database.connect(url, name="test")
            settings = Settings(
                database_url=url, data=folder / "data", model_root=model_root, lease_seconds=LEASE_SECONDS,
                trainer_interval_seconds=0.05, deaths_per_batch=1000,
            )  # fmt: skip
            yield Ground(engine, settings, folder)
            engine.dispose()

    return make


@dataclass(frozen=True)
class Undisturbed:
    """What a run without faults makes, and how long one of its steps takes."""

    lineage: Lineage
    step_seconds: float


@pytest.fixture(scope="module")
def undisturbed(ground: MakeGround) -> Undisturbed:
    """One worker from the first batch to the last."""
    with ground() as own:
        own.finish()
        with transaction(own.engine) as connection:
            seconds = connection.execute(
                text("""SELECT extract(epoch FROM max(created_at) - min(created_at))
                        FROM policy_versions WHERE version > 0""")
            ).scalar_one()
        return Undisturbed(own.lineage(), float(seconds) / (VERSIONS - 1))


def test_a_run_killed_at_random_trains_the_same_rollouts_to_the_same_bytes(
    ground: MakeGround, undisturbed: Undisturbed
) -> None:
    chance = random.Random(SEED)  # noqa: S311
    # Not the last third: a worker that finds nothing left to train would never come to its fault.
    targets = sorted(chance.randint(0, VERSIONS * 2 // 3) for _ in range(KILLS))
    with ground() as own:
        for target in targets:
            worker = own.start(_killed_in_step(chance, target - own.head() + 1, undisturbed.step_seconds))
            worker.join(60)
            assert worker.exitcode == -signal.SIGKILL
        own.finish()
        assert own.lineage() == undisturbed.lineage


def _killed_in_step(chance: random.Random, number: int, step_seconds: float) -> Fault:
    """A kill at a random moment of a process's step 1, 2, ...; before any commit if the run is ahead."""
    if number < 1 or (number == 1 and chance.random() < 0.5):
        return Fault(chance.choice(BEFORE_THE_COMMIT), "kill", 1)
    point = chance.choice(("batch_claimed", "rows_built", "stepped"))
    return Fault(point, "kill", number, chance.uniform(0, 1.2 * step_seconds))


def test_two_trainers_that_take_a_policy_from_each_other_never_fork_it(
    ground: MakeGround, undisturbed: Undisturbed
) -> None:
    """Whoever holds the lease is stopped at a random moment until the other has taken it, then woken.

    It may be in the middle of a transaction that locks the lineage, which Postgres then has to undo.
    """
    chance = random.Random(SEED + 1)  # noqa: S311
    with ground() as own:
        workers = {f"worker-{worker.pid}": worker for worker in (own.start(), own.start())}
        for target in sorted(chance.sample(range(VERSIONS - 2), min(ROUNDS, VERSIONS - 2))):
            _await(lambda least=target: own.head() >= least and own.row().holder is not None)
            threading.Event().wait(chance.uniform(0, 2 * undisturbed.step_seconds))
            holder = workers[own.row().holder]
            os.kill(holder.pid, signal.SIGSTOP)
            _await(lambda pid=holder.pid: own.row().holder != f"worker-{pid}")
            os.kill(holder.pid, signal.SIGCONT)
        _await(lambda: own.head() == VERSIONS)
        for worker in workers.values():
            worker.terminate()
            worker.join(20)
        assert own.lineage() == undisturbed.lineage


def test_a_database_that_is_away_longer_than_the_lease_loses_no_step(
    ground: MakeGround, undisturbed: Undisturbed
) -> None:
    chance = random.Random(SEED + 2)  # noqa: S311
    with ground() as own:
        worker = own.start(until_head=VERSIONS)
        for target in (VERSIONS // 4, VERSIONS // 2):
            _await(lambda least=target: own.head() >= least)
            threading.Event().wait(chance.uniform(0, 2 * undisturbed.step_seconds))
            own.engine.dispose()
            with unreachable(own.settings.database_url):
                threading.Event().wait(OUTAGE_SECONDS)
            assert worker.is_alive()
        worker.join(120)
        assert worker.exitcode == 0
        assert own.lineage() == undisturbed.lineage
        with transaction(own.engine) as connection:
            assert connection.execute(text("SELECT sum(failures) FROM batches")).scalar_one() == 0


def _await(condition: Callable[[], bool]) -> None:
    """Return once the condition holds."""
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("what was waited for never came")


def test_many_trainers_train_many_policies_each_rollout_once(
    engine: Engine, database_url: str, model_root: Path, tmp_path: Path
) -> None:
    policies, batches = ("one", "two", "three"), 4
    settings = training_ground.tiny_settings(baseline={"estimator": "leave_one_out"})
    for name in policies:
        policy_id = training_ground.make_policy(engine, settings, name)
        training_ground.add_rollouts(engine, policy_id, settings, batches * training_ground.BATCH)
    assert training_ground.form_batches(engine) == len(policies) * batches
    server = Settings(
        database_url=database_url, data=tmp_path / "data", model_root=model_root,
        lease_seconds=LEASE_SECONDS, trainer_interval_seconds=0.05,
    )  # fmt: skip
    workers = [worker_process.start(server, Fault(), FOREVER) for _ in range(3)]
    _await(lambda: len(training_ground.chain(engine)) == len(policies) * (batches + 1))
    for worker in workers:
        worker.terminate()
        worker.join(20)
    chain = training_ground.chain(engine)
    for policy_id in {row["policy_id"] for row in chain}:
        own = [row for row in chain if row["policy_id"] == policy_id]
        assert [row["version"] for row in own] == list(range(batches + 1))
        assert [row["parent"] for row in own] == [None, *range(batches)]
        assert len({row["batch_id"] for row in own[1:]}) == batches
    training_ground.check_each_trained_once(engine, len(policies) * batches * training_ground.BATCH)
