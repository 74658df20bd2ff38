"""A trainer in a process of its own that dies, loses answers or sleeps at a chosen point.

Started through a fork server that has torch loaded already, so that a restart costs nothing.
"""

import os
import signal
import threading
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


@dataclass(frozen=True)
class Fault:
    """What happens, at which point, and the how-many-th time it is reached."""

    point: str = ""
    kind: str = "kill"
    time: int = 1


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
    process: BaseProcess = context().Process(target=_work, args=(settings.model_dump(), fault, until_head))
    process.start()
    return process


def _work(settings_document: dict[str, Any], fault: Fault, until_head: int) -> None:
    import torch

    from trainer.restore import Restorer
    from trainer.worker import Worker

    torch.set_num_threads(1)
    settings = Settings(**settings_document)
    engine = database.connect(settings.database_url, name="faulty worker")
    store = DyingStore(settings.store_url, fault)
    stop = threading.Event()
    seen: dict[str, int] = {}

    def at(point: str) -> None:
        seen[point] = seen.get(point, 0) + 1
        if point == "committed" and _head(engine) >= until_head:
            stop.set()
        if point == fault.point and seen[point] == fault.time:
            _strike(fault, engine)

    worker = Worker(engine, store, settings, f"worker-{os.getpid()}", Restorer(store, settings), at)
    worker.run(stop)


def _strike(fault: Fault, engine: Engine) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "sleep":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind == "lose_answer":
        _lose_next_commit(engine, happened=True)
    if fault.kind == "lose_commit":
        _lose_next_commit(engine, happened=False)


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
