"""A trainer in a process of its own that dies, loses answers or sleeps at a chosen point.

Started through a fork server that has torch loaded already, so that a restart costs nothing.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event, text

from service.adapters.store import AdapterStore
from service.database import engine as database
from service.database.engine import transaction
from service.settings import Settings
from tests import training_ground
from yoro.ports import free_port


@dataclass(frozen=True)
class Fault:
    """What happens, at which point, and the how-many-th time it is reached; `kill` after `delay` seconds."""

    point: str = ""
    kind: str = "kill"
    time: int = 1
    delay: float = 0.0


class DyingStore(AdapterStore):
    """An adapter store whose process dies while it writes the second file."""

    def __init__(self, url: str, fault: Fault) -> None:
        super().__init__(url)
        self._fault, self._puts = fault, 0

    def _put(self, path: str, body: bytes) -> None:
        self._puts += 1
        if self._fault.point == "mid_file" and self._puts == 2:
            super()._put(path, body[: len(body) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault.point == "disk_full" and self._puts == 2:
            raise OSError(28, "No space left on device")
        super()._put(path, body)


def context() -> ForkServerContext:
    """The fork server of a test session, with torch, the trainer and the api loaded."""
    made = get_context("forkserver")
    made.set_forkserver_preload(
        ["trainer.worker", "tests.faults.worker_process", "service.api.app", "uvicorn", "yoro.cli"]
    )
    return made


def start(settings: Settings, fault: Fault, until_head: int) -> BaseProcess:
    """Start a worker that stops by itself when the head reaches `until_head`."""
    return _started(_work, settings, fault, until_head)


def start_ranks(settings: Settings, faults: Sequence[Fault], until_head: int) -> list[BaseProcess]:
    """Start one worker of several processes, each with its own fault."""
    port = free_port()
    return [
        _started(_work_as_rank, settings, fault, until_head, Place(rank, len(faults), port))
        for rank, fault in enumerate(faults)
    ]


def _started(target: Callable[..., None], settings: Settings, *arguments: Any) -> BaseProcess:
    everything = (settings.model_dump(), *arguments)
    process: BaseProcess = context().Process(target=target, args=everything, daemon=True)
    process.start()
    return process


@dataclass(frozen=True)
class Place:
    """What a launcher tells a rank."""

    rank: int
    size: int
    port: int

    def enter(self) -> None:
        """Set the variables that torch.distributed reads."""
        os.environ |= {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(self.rank),
            "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
        }  # fmt: skip


def _work_as_rank(settings_document: dict[str, Any], fault: Fault, until_head: int, place: Place) -> None:
    import torch
    from torch.distributed.tensor import DTensor

    from trainer.distributed import follow, joined_team
    from trainer.restore import Restorer

    torch.set_num_threads(1)
    place.enter()
    settings = Settings(**settings_document)
    with joined_team(settings) as team:
        if team.ranks.rank == 0:
            _work(settings_document, fault, until_head, team)
            return
        restorer = Restorer(AdapterStore(settings.store_url), settings, team.prepare if team.mesh else None)
        policy = restorer.base(training_ground.tiny_settings())
        split = any(isinstance(p, DTensor) for p in policy.base.parameters())
        assert split == policy.sharded == settings.shard_base
        passes = iter(range(1, 1 << 30))

        def count(*_: Any) -> None:
            if fault.point == "mid_forward" and next(passes) == fault.time:
                _strike(fault, None)

        policy.base.base_model.register_forward_pre_hook(count)
        follow(team.ranks, restorer)


def _work(settings_document: dict[str, Any], fault: Fault, until_head: int, team: Any = None) -> None:
    import torch

    from trainer.distributed import SOLO
    from trainer.restore import Restorer
    from trainer.worker import Worker

    torch.set_num_threads(1)
    settings = Settings(**settings_document)
    engine = database.connect(
        settings.database_url, name="faulty worker", idle_transaction_seconds=settings.lease_seconds
    )
    store = DyingStore(settings.store_url, fault)
    stop = threading.Event()
    seen: dict[str, int] = {}

    def at(point: str) -> None:
        seen[point] = seen.get(point, 0) + 1
        if point == "committed" and _head(engine) >= until_head:
            stop.set()
        if point == fault.point and seen[point] == fault.time:
            _strike(fault, engine)

    holder = f"worker-{os.getpid()}"
    team = team or SOLO
    restorer = Restorer(store, settings, team.prepare if team.mesh else None)
    worker = Worker(engine, store, settings, holder, restorer, at, team=team)
    worker.run(stop)


def _strike(fault: Fault, engine: Engine | None) -> None:
    if fault.kind == "kill" and fault.delay:
        threading.Timer(fault.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "sleep":
        _sleep()
    if engine is None:
        return
    if fault.kind == "sleep_in_transaction":
        stop = threading.Event()
        event.listen(engine, "commit", lambda _: stop.is_set() or stop.set() or _sleep())
    if fault.kind == "lose_answer":
        _lose_next_commit(engine, happened=True)
    if fault.kind == "lose_commit":
        _lose_next_commit(engine, happened=False)


def _sleep() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _lose_next_commit(engine: Engine, *, happened: bool) -> None:
    """Cut the connection at the next commit, after (`happened`) or before the server has done it."""

    struck: list[bool] = []

    def cut(connection: Any) -> None:
        if struck:
            return
        struck.append(True)
        raw = connection.connection.dbapi_connection
        if happened:
            raw.commit()
        raw.close()

    event.listen(engine, "commit", cut)


def _head(engine: Engine) -> int:
    with transaction(engine) as connection:
        return int(connection.execute(text("SELECT max(head_version) FROM lineages")).scalar_one())


def tiny_model_root(folder: Path) -> Path:
    """Write the tiny model below `folder` and return it as a model root."""
    from tests.tiny_model import write_tiny_model

    write_tiny_model(folder / "tiny")
    return folder
