"""SIGKILL of the api under load: every trace answered 2xx is stored, none twice (the benchmark: 20 times)."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
from sqlalchemy import Engine, text

from service import keys
from service.database.engine import transaction
from tests.conftest import MakePolicy
from tests.documents import trace
from yoro.ports import free_port

KILLS = 1
SENDERS = 4
ANSWERS_BEFORE_KILL = 60


def start(port: int, database_url: str, data: Path) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        "YORO_DATABASE_URL": database_url,
        "YORO_DATA": str(data),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen([sys.executable, "-m", "yoro", "api", "--port", str(port)], env=environment)
    while True:
        assert process.poll() is None
        try:
            httpx.get(f"http://127.0.0.1:{port}/healthz")
        except httpx.TransportError:
            threading.Event().wait(0.05)
        else:
            return process


class Senders:
    """Threads that post traces until their service is gone, and note what was answered."""

    def __init__(self, port: int, key: str, numbers: "itertools.count[int]", enough: int) -> None:
        self.answered: list[str] = []
        self.enough = threading.Event()
        self._port, self._key, self._numbers, self._wanted = port, key, numbers, enough
        self._threads = [threading.Thread(target=self._run) for _ in range(SENDERS)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{self._port}", headers=headers) as client:
            while True:
                name = f"crash-{next(self._numbers)}"
                try:
                    answer = client.post("/v1/traces", json=trace(trace_id=name))
                except httpx.TransportError:
                    return
                assert answer.status_code == 201
                self.answered.append(name)
                if len(self.answered) >= self._wanted:
                    self.enough.set()


def test_what_was_answered_survives_a_kill(
    engine: Engine, make_policy: MakePolicy, database_url: str, tmp_path: Path
) -> None:
    make_policy()
    with transaction(engine) as connection:
        key = keys.mint(connection, "agent", ["agent"])
    numbers, answered = itertools.count(), []
    for _ in range(KILLS):
        port = free_port()
        process = start(port, database_url, tmp_path)
        senders = Senders(port, key, numbers, ANSWERS_BEFORE_KILL)
        assert senders.enough.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
        senders.join()
        answered += senders.answered
    with transaction(engine) as connection:
        stored = list(
            connection.execute(
                text("SELECT trace_id FROM rollouts r JOIN rollout_documents d ON d.rollout_id = r.id")
            ).scalars()
        )
    assert len(answered) >= KILLS * ANSWERS_BEFORE_KILL
    assert set(answered) <= set(stored)
    assert len(stored) == len(set(stored))
    # A request whose answer the kill swallowed may be stored or not; its retry is a duplicate or new.
    assert len(set(stored) - set(answered)) <= KILLS * SENDERS
