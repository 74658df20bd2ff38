"""Pullers, pollers and a publisher that are killed at random: nobody ever sees a wrong byte.

Three processes are killed and started again: an api, a publisher that steps, promotes, rolls back and
rewinds, and a puller that follows `latest`; fifty long-polls follow both pointers.
`YORO_CHAOS_MOVES` (50 in `make test`, 200 in `make soak-adapters`) is how far it goes; `YORO_CHAOS_SEED`
seeds the moves and the kills, whose times remain the machine's.
"""

import asyncio
import json
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file
from sqlalchemy import Engine, text

from service import keys
from service.adapters.store import AdapterStore
from service.database.engine import transaction
from service.settings import Settings
from tests.service.adapters import chaos_processes as chaos
from tests.service.adapters.chaos_processes import Killed
from tests.service.adapters.lineage import NAME, A, make_lineage
from yoro.ports import free_port

MOVES = int(os.environ.get("YORO_CHAOS_MOVES", "50"))
SEED = int(os.environ.get("YORO_CHAOS_SEED", "8"))
POLLERS = 50
LEAST_KILLS = 3


def check_folder(folder: Path) -> None:
    """Everything in a version's folder follows from its number."""
    version = int(folder.name.rpartition("-v")[2])
    assert json.loads((folder / "manifest.json").read_text())["version"] == version
    assert json.loads((folder / "adapter_config.json").read_text())["v"] == version
    weights = load_file(folder / "adapter_model.safetensors")
    assert np.all(weights[A] == version)


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
    port, into = free_port(), tmp_path / "into"
    url = f"http://127.0.0.1:{port}"
    api = Killed(tmp_path / "api.log", chaos.serve, settings.database_url, settings.data, port)
    puller = Killed(tmp_path / "puller.log", chaos.pull, url, key, into)
    publisher = Killed(
        tmp_path / "publisher.log", chaos.publish,
        settings.database_url, settings.store_url, tmp_path, lineage.id, SEED,
    )  # fmt: skip
    pollers = Pollers(url, key)
    pollers.start()
    chance, midway = random.Random(SEED), 0  # noqa: S311
    try:
        while (
            sum(_moves(engine).values()) < MOVES
            or min(each.kills for each in (api, puller, publisher)) < LEAST_KILLS
        ):
            threading.Event().wait(chance.random() * 0.4)
            partial = set(into.glob(".*.partial"))
            if puller.strike(_came(into)):
                midway += any(path in partial for path in into.glob(".*.partial"))
            if chance.random() < 0.25:
                api.strike(pollers.answers // POLLERS)
            if chance.random() < 0.25:
                publisher.strike(sum(_moves(engine).values()) // 3)
            for folder in into.glob(f"{NAME}-v*"):
                check_folder(folder)
        publisher.end()
        _await_settled(engine, into)
    finally:
        pollers.stop.set()
        for each in (puller, publisher, api):
            each.end()
    pollers.join(30)
    assert pollers.wrong == []
    for folder in into.glob(f"{NAME}-v*"):
        check_folder(folder)
    _check_chain(engine)
    kills = {
        "api": api.kills,
        "publisher": publisher.kills,
        "puller": puller.kills,
        "amid a download": midway,
    }
    print(f"seed {SEED}: {dict(_moves(engine))}, {pollers.answers} answers, kills {kills}")


def _moves(engine: Engine) -> Counter[str]:
    """Count what was done by kind: a step or a rewind may have moved both pointers."""
    done = """SELECT split_part(reason, ' ', 1) FROM pointer_moves
              WHERE pointer = 'latest' OR split_part(reason, ' ', 1) NOT IN ('step', 'rewind')"""
    with transaction(engine) as connection:
        return Counter(connection.execute(text(done)).scalars())


def _came(into: Path) -> int:
    return len(list(into.glob(f"{NAME}-v*"))) + len(list(into.glob(".*.partial")))


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
