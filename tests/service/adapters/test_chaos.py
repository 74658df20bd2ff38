"""Pullers, pollers and a publisher that are killed at random: nobody ever sees a wrong byte.

One api in a process of its own that is killed and started again, a publisher process that steps,
promotes, rolls back and rewinds, pullers that follow `latest` and are killed midway, fifty pollers. What a
version must hold is a function of its number, so every folder that appears can be judged by itself.
`YORO_CHAOS_MOVES` (6 in `make test`, 200 in `make soak-adapters`) is how far it goes.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file
from sqlalchemy import Engine, text

from service import keys
from service.adapters.store import AdapterStore
from service.database import engine as database
from service.database.engine import transaction
from service.settings import Settings
from tests.service.adapters.lineage import NAME, A, make_lineage

MOVES = int(os.environ.get("YORO_CHAOS_MOVES", "6"))
POLLERS = 50

PUBLISHER = "from tests.service.adapters.test_chaos import publish_for_ever; publish_for_ever()"
PULLER = """
import sys
from pathlib import Path
from yoro.client import Client
from yoro.following import follow
follow(Client(sys.argv[1], sys.argv[2], retries=2), "tiny", Path(sys.argv[3]), "latest",
       arrived=lambda version, folder: None, failed=lambda message: None)
"""


def publish_for_ever() -> None:
    """Move the lineage on: mostly a step, sometimes a promotion, a rollback or a rewind."""
    url, adapters, scratch, policy_id = sys.argv[1:5]
    from service.adapters import pointers
    from service.batches.rewind import rewind
    from service.errors import Conflict, NotFound
    from tests import training_ground
    from tests.service.adapters.lineage import Lineage

    lineage = Lineage(
        database.connect(url, name="publisher"), AdapterStore(adapters), Path(scratch, str(os.getpid())),
        training_ground.tiny_settings(), int(policy_id), width=20_000,
    )  # fmt: skip
    chance = random.Random(os.getpid())  # noqa: S311
    for _ in range(os.getpid() % 100_000 * 100):
        next(lineage._tasks)  # task names of our own
    moves = {"promote": pointers.promote, "rollback": pointers.roll_back, "rewind": rewind}
    while True:
        head = lineage.row().head_version
        move = chance.choices(["step", *moves], weights=[6, 1, 1, 2])[0]
        try:
            if move == "step":
                lineage.add_rollouts(training_ground.BATCH, head)
                training_ground.form_batches(lineage.engine)
                lineage.commit(*lineage.claim())
            else:
                with transaction(lineage.engine) as connection:
                    moves[move](connection, lineage.id, chance.randint(0, head), reason=f"{move} by chaos")
        except (Conflict, NotFound, AssertionError):
            continue  # a rollback that is none, a batch that a rewind took


class Killed:
    """A process that is killed now and then, and started again."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self._arguments, self._environment = arguments, os.environ | environment
        self.process = self._start()
        self.kills = self._seen = 0

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._arguments, env=self._environment, stderr=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL)  # fmt: skip

    def strike(self, progress: int, least: int) -> None:
        """Kill it and start it again, if it has come far enough since the last time to matter."""
        if progress < self._seen + least:
            return
        self._seen = progress
        self.kills += 1
        self.end()
        self.process = self._start()

    def end(self) -> None:
        """Kill it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def check_folder(folder: Path) -> None:
    """Everything in a version's folder follows from its number."""
    version = int(folder.name.rpartition("-v")[2])
    assert json.loads((folder / "manifest.json").read_text())["version"] == version
    assert json.loads((folder / "adapter_config.json").read_text())["v"] == version
    weights = load_file(folder / "adapter_model.safetensors")
    assert np.all(weights[A] == version)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pollers(threading.Thread):
    """Fifty long-polls in turn; each answer is compared with what the version must be."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(daemon=True)
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self.stop = threading.Event()
        self.answers, self.wrong = 0, list[Any]()

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=20, limits=limits
        ) as client:
            await asyncio.gather(*(self._poll(client, number) for number in range(POLLERS)))

    async def _poll(self, client: httpx.AsyncClient, number: int) -> None:
        at, pointer = -1, ("latest", "promoted")[number % 2]
        while not self.stop.is_set():
            try:
                answer = await client.get(
                    f"/v1/policies/{NAME}/adapters/{pointer}",
                    params={"wait": 1} | ({"unless": at} if at >= 0 else {}),
                )
            except httpx.TransportError:
                await asyncio.sleep(0.2)  # the api was killed
                continue
            if answer.status_code == 304:
                continue
            if answer.status_code != 200:
                self.wrong += [answer.text] * (answer.status_code not in (503, 429))
                continue
            document = answer.json()
            self.answers += 1
            if document["version"] == at:
                self.wrong.append(("woken for nothing", at))
            at = document["version"]
            if at and document["probe"]["logprobs"][0] != -0.1 * at:
                self.wrong.append(document)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nobody_sees_a_wrong_byte_whatever_is_killed(
    engine: Engine, settings: Settings, store: AdapterStore, tmp_path: Path
) -> None:
    lineage = make_lineage(engine, store, tmp_path / "first")
    lineage.step()
    with transaction(engine) as connection:
        key = keys.mint(connection, "ops", ["ops"])
    port = free_port()
    url, into = f"http://127.0.0.1:{port}", tmp_path / "into"
    python = [sys.executable, "-c"]
    api = Killed(
        [sys.executable, "-m", "yoro", "api", "--port", str(port)],
        YORO_DATABASE_URL=settings.database_url, YORO_ADAPTERS_URL=settings.store_url,
    )  # fmt: skip
    publisher = Killed(
        [*python, PUBLISHER, settings.database_url, settings.store_url, str(tmp_path), str(lineage.id)]
    )
    puller = Killed([*python, PULLER, url, key, str(into)])
    pollers = Pollers(url, key)
    pollers.start()
    chance, deadline = random.Random(8), time.monotonic() + 1000  # noqa: S311
    try:
        while time.monotonic() < deadline and not (
            _moves(engine) >= MOVES and pollers.answers > POLLERS and puller.kills and api.kills
        ):
            threading.Event().wait(chance.random() * 0.3)
            came = len(list(into.glob(f"{NAME}-v*"))) + len(list(into.glob(".*.partial")))
            puller.strike(came, 1)
            if chance.random() < 0.2:
                api.strike(pollers.answers, POLLERS)
                publisher.strike(_moves(engine), 5)
            for folder in into.glob(f"{NAME}-v*") if into.exists() else ():
                check_folder(folder)
        publisher.end()
        _await_settled(engine, into)
    finally:
        pollers.stop.set()
        for each in (puller, publisher, api):
            each.end()
    pollers.join(30)
    assert _moves(engine) >= MOVES
    assert pollers.wrong == []
    for folder in into.glob(f"{NAME}-v*"):
        check_folder(folder)
    _check_chain(engine)
    print(f"moves {_moves(engine)}, answers {pollers.answers}, kills of api {api.kills}, "
          f"puller {puller.kills}, publisher {publisher.kills}")  # fmt: skip


def _moves(engine: Engine) -> int:
    with transaction(engine) as connection:
        return int(connection.execute(text("SELECT count(*) FROM pointer_moves")).scalar_one())


def _await_settled(engine: Engine, into: Path) -> None:
    """The puller comes to where the pointer stands once nobody moves it."""
    with transaction(engine) as connection:
        head = connection.execute(text("SELECT head_version FROM lineages")).scalar_one()
    link = into / "current"
    for _ in range(600):
        at = link.resolve().name if link.is_symlink() else f"{NAME}-v0"
        if at == f"{NAME}-v{head}":
            return
        threading.Event().wait(0.1)
    pytest.fail(f"the puller never came to version {head}")


def _check_chain(engine: Engine) -> None:
    with transaction(engine) as connection:
        rows = connection.execute(text("SELECT version, parent, depth FROM policy_versions")).all()
        next_version = connection.execute(text("SELECT next_version FROM lineages")).scalar_one()
    depths = {row.version: row.depth for row in rows}
    assert next_version == max(depths) + 1
    assert all(row.depth == depths[row.parent] + 1 for row in rows if row.version)
