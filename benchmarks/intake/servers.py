"""Servers of the intake benchmark: an embedded Postgres with durable settings, an api, the bare app.

Every process is a child of this one and ended by it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from sqlalchemy import Engine, text

from benchmarks.intake.documents import POLICY
from service import keys
from service.database import engine as database
from service.database import migrate, policies
from service.database.embedded import EmbeddedPostgres
from service.database.engine import transaction
from service.policies import PolicySettings

API_PORT, BARE_PORT, KEPT_PORT = 18080, 18081, 18082
START_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Installation:
    """A database with one policy and one key of all roles."""

    postgres: EmbeddedPostgres
    engine: Engine
    key: str
    policy_id: int

    def empty(self) -> None:
        """Remove every rollout and grade, and let Postgres tidy up outside of what is timed."""
        with transaction(self.engine) as connection:
            connection.execute(text("TRUNCATE grades, rollout_features, rollout_documents, rollouts CASCADE"))
        self.tidy()

    def tidy(self) -> None:
        """Analyse and write out what earlier measurements left dirty."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))
            connection.execute(text("CHECKPOINT"))

    def count(self, table: str) -> int:
        """Count a table's rows."""
        with transaction(self.engine) as connection:
            return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())  # noqa: S608


@contextmanager
def installation() -> Iterator[Installation]:
    """Run a Postgres with fsync and synchronous_commit on, migrated, with a policy and a key."""
    with tempfile.TemporaryDirectory(prefix="yoro-bench-") as folder:
        Path(folder).chmod(0o755)
        postgres = EmbeddedPostgres(Path(folder) / "data", options=("-c", "max_wal_size=4GB"))
        engine = database.connect(postgres.url(), name="bench", pool_size=4)
        try:
            migrate.upgrade(engine)
            with transaction(engine) as connection:
                policy = policies.create(connection, POLICY, PolicySettings(base_model="smollm2-135m"))
                key = keys.mint(connection, "bench", ["admin"])
            yield Installation(postgres, engine, key, policy)
        finally:
            engine.dispose()
            postgres.stop()


@dataclass(frozen=True, slots=True)
class Process:
    """One HTTP server."""

    popen: "subprocess.Popen[bytes]"
    url: str

    @property
    def rss_bytes(self) -> int:
        """Return what it holds in memory now."""
        return int(psutil.Process(self.popen.pid).memory_info().rss)

    def kill(self) -> None:
        """End it as a crash would."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()


def start_api(
    where: Installation, environment: Mapping[str, str] | None = None, *, port: int = API_PORT
) -> Process:
    """Start one api process and wait until it is ready."""
    command = [sys.executable, "-m", "yoro", "api", "--port", str(port)]
    database = {"YORO_DATABASE_URL": where.postgres.url()}
    return start(command, f"http://127.0.0.1:{port}", "/readyz", database | dict(environment or {}))


def start_bare(where: Installation) -> Process:
    """Start the app that stores nothing."""
    command = [sys.executable, "-m", "benchmarks.intake.bare", str(BARE_PORT)]
    database = {"YORO_DATABASE_URL": where.postgres.url()}
    return start(command, f"http://127.0.0.1:{BARE_PORT}", "/openapi.json", database)


@contextmanager
def running(process: Process) -> Iterator[Process]:
    """Stop the process at the end."""
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.terminate()
            process.popen.wait(60)


def start(
    command: list[str], url: str, ready: str, environment: Mapping[str, str], folder: str | None = None
) -> Process:
    """Start a server and wait until it answers at `ready`; with a folder, it runs and logs there."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", **environment}
    with ExitStack() as stack:
        log = stack.enter_context(Path(folder, "server.log").open("ab")) if folder else None
        popen = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=log)
    process = Process(popen, url)
    last: object = "it ended"
    deadline = time.monotonic() + START_SECONDS
    while process.popen.poll() is None and time.monotonic() < deadline:
        try:
            answer = httpx.get(url + ready, timeout=5)
        except httpx.TransportError as error:
            last = error
        else:
            if answer.is_success:
                return process
            last = answer.text
        time.sleep(0.05)
    process.kill()
    raise RuntimeError(f"{command} did not start: {last}")
