"""`yoro up`: Postgres, api, scheduler, trainer, with Kafka if asked for, on one machine, as processes.

Invariants: one `up` a folder (a lock); every child ends with its parent, whatever ends the parent; a
child that dies is started again, slower each time; a leftover of an earlier run is ended only if pid
and start time match the folder's record.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx

from service import keys, telemetry
from service.database import engine as database
from service.database import migrate
from service.database.embedded import EmbeddedPostgres, end_recorded, identity
from service.errors import Conflict, Unavailable
from service.settings import Settings
from yoro.broker import EmbeddedBroker
from yoro.ports import check_port

STOP_SECONDS = 60.0
"""Time a child has to finish what it holds before it is killed."""
READY_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""A child that ran this long is restarted at once when it dies."""
LONGEST_PAUSE = 30.0
PARTITIONS = 4
"""Of each topic of the embedded broker."""


@dataclass(slots=True)
class _Child:
    """One process that is kept running."""

    name: str
    arguments: Sequence[str]
    process: "subprocess.Popen[bytes]"
    started: float
    pause: float = 0.5


@dataclass(slots=True)
class Up:
    """A running installation over one data folder."""

    settings: Settings
    host: str
    port: int
    without: frozenset[str] = frozenset()
    log: Callable[[str], None] = lambda line: None
    kafka_port: int = 0
    """Port of an embedded broker, with a consumer; 0: neither."""
    _children: list[_Child] = field(default_factory=list)
    _postgres: EmbeddedPostgres | None = None
    _broker: EmbeddedBroker | None = None
    _lock: IO[str] | None = None
    _pipe: tuple[int, int] = (-1, -1)
    _url: str = ""

    @property
    def url(self) -> str:
        """Return where the API answers."""
        return f"http://{self.host}:{self.port}"

    @property
    def key_file(self) -> Path:
        """Return where the admin's key lies."""
        return self.settings.data / "admin.key"

    def start(self, database_url: str | None) -> None:
        """Start everything and wait until the API answers. Raises Conflict or Unavailable."""
        data = self.settings.data
        data.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(data)
        try:
            check_port(self.host, self.port)
            for record in sorted((data / "processes").glob("*.json")):
                if end_recorded(record, signal.SIGTERM):
                    self.log(f"ended a leftover of an earlier run: {record.stem}")
            self._pipe = os.pipe()
            if database_url is None:
                self._postgres = EmbeddedPostgres(data / "postgres")
            self._url = database_url or self._running_postgres().url()
            self._prepare_database()
            if self.kafka_port:
                self._start_broker(EmbeddedBroker(data / "kafka", self.kafka_port))
            self._start_children()
        except BaseException:
            self.stop()
            raise

    def watch(self, stop: threading.Event) -> None:
        """Keep the children running until `stop`."""
        while not stop.wait(0.2):
            self._revive_servers()
            for child in self._children:
                self._revive(child)

    def stop(self) -> None:
        """Stop the children, the trainer first, then Postgres. May be called twice."""
        for child in reversed(self._children):
            child.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for child in reversed(self._children):
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            self._record(child.name).unlink(missing_ok=True)
        self._children.clear()
        for server in (self._broker, self._postgres):
            if server is not None:
                server.stop()
        self._broker = self._postgres = None
        for end in self._pipe:
            if end >= 0:
                os.close(end)
        self._pipe = (-1, -1)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _prepare_database(self) -> None:
        engine = database.connect(self._url, name="up")
        try:
            migrate.upgrade(engine)
            if not self.key_file.exists():
                with database.transaction(engine) as connection:
                    key = keys.mint(connection, "admin of yoro up", ["admin"])
                _write_private(self.key_file, key)
                self.log(f"wrote the admin key to {self.key_file}")
        finally:
            engine.dispose()

    def _start_broker(self, broker: EmbeddedBroker) -> None:
        from service.ingest.kafka import create_topics
        from service.ingest.messages import all_topics

        self._broker = broker
        kafka = self.settings.kafka.model_copy(update={"bootstrap": broker.bootstrap})
        create_topics(kafka, self.settings.limits, all_topics(kafka), partitions=PARTITIONS, replication=1)

    def _start_children(self) -> None:
        self._spawn("api", ["api", "--host", self.host, "--port", str(self.port)])
        self._await_api()
        if self._broker is not None:
            self._spawn("consumer", ["consume"])
        if "scheduler" not in self.without:
            self._spawn("scheduler", ["schedule"])
        if "trainer" not in self.without:
            self._spawn("trainer", ["train"])

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        process = self._launch(name, arguments)
        self._children.append(_Child(name, arguments, process, time.monotonic()))

    def _launch(self, name: str, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        reader, _ = self._pipe
        logs = self.settings.data / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "yoro", *arguments, "--lifeline", str(reader)],
                pass_fds=[reader], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env=self._environment(name),
            )  # fmt: skip
        record = self._record(name)
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps(identity(process.pid)))
        return process

    def _environment(self, name: str) -> Mapping[str, str]:
        threads = str(_threads(name))
        share_cores()
        return (
            os.environ
            | {
                "YORO_DATABASE_URL": self._url,
                "YORO_DATA": str(self.settings.data.resolve()),
                "YORO_THREADS": threads,
                "OMP_NUM_THREADS": threads,
                "OPENBLAS_NUM_THREADS": threads,
                "TOKENIZERS_PARALLELISM": "false",
            }
            | ({} if self._broker is None else {"YORO_KAFKA_BOOTSTRAP": self._broker.bootstrap})
        )

    def _await_api(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            child = self._children[0]
            if child.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/readyz", timeout=2.0).is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        log = (self.settings.data / "logs" / "api.log").read_text(errors="replace")[-2000:]
        raise Unavailable(f"The API did not start:\n{log}")

    def _revive(self, child: _Child) -> None:
        code = child.process.poll()
        if code is None:
            return
        lived = time.monotonic() - child.started
        child.pause = 0.5 if lived > STEADY_SECONDS else min(LONGEST_PAUSE, child.pause * 2)
        self.log(f"{child.name} ended ({_ending(code)}), starting it again in {child.pause:.0f} s")
        time.sleep(child.pause)
        child.process = self._launch(child.name, child.arguments)
        child.started = time.monotonic()

    def _revive_servers(self) -> None:
        for name, server in (("Postgres", self._postgres), ("The broker", self._broker)):
            if server is not None and server.process.poll() is not None:
                self.log(f"{name} ended, starting it again")
                server.restart()

    def _running_postgres(self) -> EmbeddedPostgres:
        if self._postgres is None:
            raise Unavailable("Postgres is not running")
        return self._postgres

    def _record(self, name: str) -> Path:
        return self.settings.data / "processes" / f"{name}.json"


def share_cores() -> None:
    """Make threads of this process and its children wait asleep; call it before torch is loaded.

    The processes share the cores: spinning, two threads take three times as long as one when a
    neighbour works.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _threads(name: str) -> int:
    cores = os.cpu_count() or 1
    return cores if name == "trainer" else max(1, cores // 2) if name == "scheduler" else 1


def lock_folder(data: Path) -> IO[str]:
    """Take an installation's folder for this process, until the lock is closed. Raises Conflict."""
    lock = (data / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise Conflict(f"Another `yoro up` runs in {data}", code="folder_in_use") from error
    return lock


def _write_private(path: Path, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(text + "\n")


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def run_until_signal(up: Up) -> None:
    """Watch until SIGINT or SIGTERM, then stop everything."""
    stop = threading.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: stop.set())
    try:
        up.watch(stop)
    finally:
        up.log("stopping")
        up.stop()
        telemetry.logger().info("stopped")
