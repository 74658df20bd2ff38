"""MLflow's tracking server and Arize Phoenix beside yoro: traces made durable in a second.

Each rival is installed in an environment of its own (benchmarks/.venvs) and keeps its traces in a
database of its own on the same Postgres. All arms get the same content from the same load generator:
the rivals as OTLP protobuf, yoro as its own JSON until it takes OTLP. A trace counts when its row is
in the database; what a server still holds when the load ends is waited for, and the wait is counted.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine, text

from benchmarks.intake import documents
from benchmarks.intake.otlp_body import SPAN_PLACE, TRACE_PLACE
from benchmarks.intake.servers import Installation, Process, running, start, start_api
from benchmarks.intake.wrk import PLACE, load, load_batches, load_binary
from benchmarks.report import Report
from yoro.ports import free_port

VENVS = Path(__file__).parents[1] / ".venvs"
CONNECTIONS, BATCH, SETTLED_SECONDS = 16, 100, 15.0
SHAPES = {"single traces": 1, f"batches of {BATCH}": BATCH}
BOUND = 30.0


@dataclass(frozen=True, slots=True)
class Rival:
    """How to install, start and count one tracing server."""

    name: str
    packages: tuple[str, ...]
    command: tuple[str, ...]
    """`{database}`, `{port}` and `{other_port}` are replaced here and in the environment."""
    environment: Mapping[str, str]
    ready: str
    headers: Mapping[str, str]
    count: str
    """Statement that counts what is durable."""


RIVALS = (
    Rival(
        "mlflow", ("mlflow==3.17.0", "psycopg2-binary"),
        ("mlflow", "server", "--backend-store-uri", "postgresql+psycopg2://{database}", "--port", "{port}"),
        {}, "/health", {"x-mlflow-experiment-id": "0"}, "SELECT count(*) FROM trace_info",
    ),
    Rival(
        "phoenix", ("arize-phoenix[pg]==20.26.1",), ("phoenix", "serve"),
        {
            "PHOENIX_SQL_DATABASE_URL": "postgresql://{database}", "PHOENIX_PORT": "{port}",
            "PHOENIX_GRPC_PORT": "{other_port}", "PHOENIX_WORKING_DIR": "{folder}",
            "PHOENIX_TELEMETRY_ENABLED": "false", "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
        },
        "/healthz", {}, "SELECT count(*) FROM spans",
    ),
)  # fmt: skip


def measure(report: Report, where: Installation, seconds: float) -> None:
    """Measure every server in turn, by single traces and by batches; compare like with like."""
    ours = _ours(where, seconds)
    best = dict.fromkeys(ours, 0.0)
    for shape, rate in ours.items():
        report.add(f"yoro, {shape} (its own JSON)", rate, "durable traces/s")
    for rival in RIVALS:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="yoro-rival-"))
            server = stack.enter_context(running(_started(rival, where, folder)))
            for run, (shape, count) in enumerate(SHAPES.items(), start=1):
                body = _body(rival, Path(folder), count)
                rate = _durable(rival, server, where, body, seconds=seconds, run=run)
                report.add(f"{rival.name}, {shape} (OTLP)", rate, "durable traces/s")
                best[shape] = max(best[shape], rate)
    for shape, rate in ours.items():
        report.add(f"yoro over the better rival, {shape}", rate / best[shape], "ratio", BOUND)


def _ours(where: Installation, seconds: float) -> dict[str, float]:
    def single() -> None:
        load(
            api.url, "/v1/traces", where.key, documents.encoded(documents.trace(PLACE)),
            connections=CONNECTIONS, seconds=seconds, run="rivals-single",
        )  # fmt: skip

    def batches() -> None:
        load_batches(
            api.url, where.key, documents.trace, BATCH, connections=CONNECTIONS, seconds=seconds,
            run="rivals-batches",
        )  # fmt: skip

    with running(start_api(where)) as api:
        sent = zip(SHAPES, (single, batches), strict=True)
        return {shape: _counted(lambda: where.count("rollouts"), send) for shape, send in sent}


def _body(rival: Rival, folder: Path, count: int) -> Path:
    """Encode `count` traces by the rival's own protobuf schema."""
    document, body = folder / "document.json", folder / f"body-{count}"
    document.write_text(json.dumps(documents.trace("x")))
    script = Path(__file__).with_name("otlp_body.py")
    with body.open("wb") as file:
        subprocess.run([_bin(rival) / "python", script, document, str(count)], stdout=file, check=True)
    return body


def _durable(
    rival: Rival, server: Process, where: Installation, body: Path, *, seconds: float, run: int
) -> float:
    """Send the body for a while, each time under new ids, and count the rows."""
    headers = {"Content-Type": "application/x-protobuf", **rival.headers}
    engine = create_engine(where.postgres.url(rival.name))
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return _counted(
                lambda: int(connection.execute(text(rival.count)).scalar_one()),
                lambda: load_binary(
                    server.url, "/v1/traces", headers, body, {TRACE_PLACE: 16, SPAN_PLACE: 8},
                    connections=CONNECTIONS, seconds=seconds, run=run,
                ),
            )  # fmt: skip
    finally:
        engine.dispose()


def _counted(count: Callable[[], int], send: Callable[[], object]) -> float:
    """Durable rows a second, from the first request until the last row has come."""
    before, started = count(), time.monotonic()
    send()
    found, ended = count(), time.monotonic()
    while time.monotonic() - ended < SETTLED_SECONDS:
        time.sleep(0.1)
        now = count()
        if now > found:
            found, ended = now, time.monotonic()
    return (found - before) / (ended - started)


def _started(rival: Rival, where: Installation, folder: str) -> Process:
    _install(rival)
    with where.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"DROP DATABASE IF EXISTS {rival.name}"))
        connection.execute(text(f"CREATE DATABASE {rival.name}"))
    values = {
        "database": where.postgres.url(rival.name).partition("://")[2],
        "port": str(free_port()),
        "other_port": str(free_port()),
        "folder": folder,
    }
    program, *arguments = (part.format(**values) for part in rival.command)
    environment = {name: value.format(**values) for name, value in rival.environment.items()}
    # The rival's own interpreter first: mlflow starts its workers by name.
    environment["PATH"] = f"{_bin(rival)}{os.pathsep}{os.environ['PATH']}"
    command = [str(_bin(rival) / program), *arguments]
    return start(command, f"http://127.0.0.1:{values['port']}", rival.ready, environment, folder)


def _install(rival: Rival) -> None:
    if _bin(rival).exists():
        return
    print(f"  installing {rival.packages[0]} into {VENVS / rival.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", VENVS / rival.name], check=True)
    subprocess.run([_bin(rival) / "pip", "install", "--quiet", *rival.packages], check=True)


def _bin(rival: Rival) -> Path:
    return VENVS / rival.name / "bin"
