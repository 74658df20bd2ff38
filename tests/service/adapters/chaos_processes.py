"""The processes of test_chaos.py, started from the fork server that has their modules loaded.

What a version must hold is a function of its number, so whoever sees one can judge it alone.
"""

import itertools
import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.adapters import pointers
from service.adapters.store import AdapterStore
from service.batches import claims, leases
from service.batches.rewind import rewind
from service.database import engine as database
from service.database.engine import transaction
from service.errors import Conflict, NotFound
from tests import training_ground
from tests.faults import worker_process
from tests.service.adapters.lineage import NAME, Lineage

MOVES: dict[str, Callable[..., Any]] = {
    "promote": pointers.promote, "rollback": pointers.roll_back, "rewind": rewind,
}  # fmt: skip
PAUSE_SECONDS = 0.2
"""Longest time between two moves, so that pullers are amid them and not behind."""


class Killed:
    """A process that is killed now and then, and started again: `target(*arguments, incarnation)`."""

    def __init__(self, log: Path, target: Callable[..., None], *arguments: Any) -> None:
        self._log, self._target, self._arguments = log, target, arguments
        self.kills = self._seen = 0
        self.process = self._start()

    def _start(self) -> Any:
        process = worker_process.context().Process(
            target=_logged, args=(self._log, self._target, *self._arguments, self.kills)
        )
        process.start()
        return process

    def strike(self, progress: int) -> bool:
        """Kill it and start it again, if it came further since the last time; tell whether it was killed."""
        if progress <= self._seen:
            return False
        self._seen = progress
        self.kills += 1
        self.end()
        self.process = self._start()
        return True

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()


def _logged(log: Path, target: Callable[..., None], *arguments: Any) -> None:
    with log.open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    target(*arguments)


def publish(url: str, store: str, scratch: Path, policy_id: int, seed: int, incarnation: int) -> None:
    """Move the lineage on until killed: mostly a step, else a promotion, a rollback or a rewind."""
    lineage = Lineage(
        database.connect(url, name="publisher"), AdapterStore(store), scratch / f"publisher-{incarnation}",
        training_ground.tiny_settings(), policy_id, width=20_000,
        _tasks=itertools.count(incarnation * 10_000),
    )  # fmt: skip
    chance = random.Random(f"{seed}-{incarnation}")  # noqa: S311
    while True:
        move = chance.choices(["step", *MOVES], [5, 2, 2, 2])[0]
        if move == "step":
            _step(lineage)
        else:
            _move(lineage, move, chance.randint(0, lineage.row().head_version))
        threading.Event().wait(chance.random() * PAUSE_SECONDS)


def _step(lineage: Lineage) -> None:
    """Train a batch; where a held pointer lags too far behind for one to form, promote the head."""
    head = lineage.row().head_version
    lineage.add_rollouts(training_ground.BATCH, head)
    training_ground.form_batches(lineage.engine)
    lease = leases.claim(lineage.engine, lineage.id, "trainer", 30.0)
    assert lease is not None  # the one killed before had the same name
    batch = claims.claim_batch(lineage.engine, lease)
    if batch is None:
        _move(lineage, "promote", head)
    else:
        lineage.commit(lease, batch)


def _move(lineage: Lineage, move: str, version: int) -> None:
    with suppress(Conflict, NotFound), transaction(lineage.engine) as connection:
        MOVES[move](connection, lineage.id, version, reason=f"{move} by chaos")


def pull(url: str, key: str, into: Path, incarnation: int) -> None:
    """Follow `latest` until killed."""
    from yoro.client import Client
    from yoro.following import follow

    follow(
        Client(url, key, retries=2), NAME, into, "latest",
        arrived=lambda version, folder: None, failed=lambda message: print(message, flush=True),
    )  # fmt: skip


def serve(url: str, data: Path, port: int, incarnation: int) -> None:
    """Run `yoro api` until killed."""
    from yoro.cli import main

    os.environ |= {"YORO_DATABASE_URL": url, "YORO_DATA": str(data)}
    sys.argv = ["yoro", "api", "--port", str(port)]
    main()
