"""Serving adapters: download throughput against nginx's, polls of `latest` against an empty FastAPI route.

    python -m benchmarks.adapters [--megabytes 64] [--seconds 4]

Figures are per second of the server's own processor time (psutil), since the machine is rarely idle;
arms alternate, medians of the rounds count. Needs Debian's nginx and wrk; every server is a child of this
process. Writes benchmarks/results/adapters.json.
"""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from safetensors.numpy import save_file
from sqlalchemy import text

from benchmarks.report import Report, fail
from service import keys
from service.adapters.store import AdapterStore, describe_file
from service.database import engine as database
from service.database import migrate, policies
from service.database.embedded import EmbeddedPostgres
from service.database.engine import transaction
from service.policies import PolicySettings

API, BARE, NGINX = 18090, 18091, 18092
ROUNDS = 3
NAME, FILE = "bench", "adapter_model.safetensors"
_BARE = """
import uvicorn
from fastapi import FastAPI
app = FastAPI()
@app.get("/empty")
async def empty() -> dict[str, str]:
    return {}
uvicorn.run(app, host="127.0.0.1", port=%d, log_level="warning", access_log=False)
"""
_NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{ access_log off; sendfile on; tcp_nopush on;
  server {{ listen 127.0.0.1:{port}; root {root}; }} }}
"""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    wanted = parser.parse_args()
    for tool in ("nginx", "wrk"):
        if shutil.which(tool) is None:
            fail(f"{tool} is missing: apt-get install {tool}")
    report = Report("adapters", f"python -m benchmarks.adapters --megabytes {wanted.megabytes}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="yoro-bench-")))
        folder.chmod(0o755)
        key, url = stack.enter_context(published(folder, wanted.megabytes))
        environment = {"YORO_DATABASE_URL": url, "YORO_DATA": str(folder), "YORO_THREADS": "1"}
        api = stack.enter_context(
            server([sys.executable, "-m", "yoro", "api", "--port", str(API)], API, **environment)
        )
        bare = stack.enter_context(server([sys.executable, "-c", _BARE % BARE], BARE))
        nginx = stack.enter_context(server(nginx_command(folder), NGINX))
        measure_downloads(report, api, nginx, key, wanted.seconds)
        measure_polls(report, api, bare, key, wanted.seconds)
    sys.exit(0 if report.write() else 1)


@contextmanager
def published(folder: Path, megabytes: int) -> Iterator[tuple[str, str]]:
    """Run a Postgres and publish one version of random weights; yield a key and the database's URL."""
    postgres = EmbeddedPostgres(folder / "postgres", options=("-c", "fsync=off"))
    engine = database.connect(postgres.url(), name="bench")
    try:
        migrate.upgrade(engine)
        source = folder / "source"
        source.mkdir()
        weights = np.random.default_rng(0).standard_normal((megabytes << 18), dtype=np.float32)
        save_file({"weights": weights}, source / FILE)
        manifest: dict[str, Any] = {"files": [asdict(describe_file(source / FILE))], "state": []}
        store_folder = f"{NAME}/v1-1-1"
        digest = AdapterStore(str(folder / "adapters")).write_version(store_folder, source, manifest)
        with transaction(engine) as connection:
            policy = policies.create(connection, NAME, PolicySettings(base_model="smollm2-135m"))
            connection.execute(
                text("""INSERT INTO policy_versions (policy_id, version, parent, depth, fencing_token, folder,
                            manifest, manifest_sha256)
                        VALUES (:p, 1, 0, 1, 1, :f, CAST(:m AS jsonb), :d)"""),
                {"p": policy, "f": store_folder, "m": orjson_text(manifest), "d": digest},
            )
            connection.execute(text("UPDATE lineages SET head_version = 1, promoted_version = 1"))
            key = keys.mint(connection, "ops", ["ops"])
        yield key, postgres.url()
    finally:
        engine.dispose()
        postgres.stop()


def orjson_text(document: dict[str, Any]) -> str:
    """Return a document as JSON."""
    import orjson

    return orjson.dumps(document).decode()


def nginx_command(folder: Path) -> list[str]:
    """Write a configuration that serves the store as files; return the command."""
    place = folder / "nginx"
    place.mkdir()
    for path in (folder / "adapters").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    configuration = place / "nginx.conf"
    configuration.write_text(_NGINX.format(folder=place, port=NGINX, root=folder / "adapters"))
    return ["nginx", "-p", str(place), "-c", str(configuration)]


@contextmanager
def server(command: list[str], port: int, **environment: str) -> Iterator[psutil.Process]:
    """Run a server until the block ends; yield the process that serves once it answers."""
    process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                httpx.get(f"http://127.0.0.1:{port}/healthz")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        else:
            fail(f"{command[0]} did not start")
        workers = psutil.Process(process.pid).children()
        yield workers[0] if workers else psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def measure_downloads(
    report: Report, api: psutil.Process, nginx: psutil.Process, key: str, seconds: float
) -> None:
    """Fetch the same file from both, over and over."""
    path = f"/v1/policies/{NAME}/adapters/1/files/{FILE}"
    arms = {
        "api": lambda: download(API, path, key, api, seconds),
        "nginx": lambda: download(NGINX, f"/{NAME}/v1-1-1/{FILE}", key, nginx, seconds),
    }
    found = alternated(arms)
    per_core = {arm: statistics.median(rate for rate, _ in runs) for arm, runs in found.items()}
    wall = {arm: statistics.median(rate for _, rate in runs) for arm, runs in found.items()}
    report.add("download from api, a core", per_core["api"] / 1e6, "MB/s", 500.0)
    report.add("download from nginx, a core", per_core["nginx"] / 1e6, "MB/s")
    report.add("api / nginx, a core", per_core["api"] / per_core["nginx"], "ratio")
    report.add("download from api, wall clock, one connection", wall["api"] / 1e6, "MB/s")
    report.add("download from nginx, wall clock, one connection", wall["nginx"] / 1e6, "MB/s")


def measure_polls(
    report: Report, api: psutil.Process, bare: psutil.Process, key: str, seconds: float
) -> None:
    """Poll `latest` with an ETag that holds, and an empty FastAPI endpoint."""
    latest = f"http://127.0.0.1:{API}/v1/policies/{NAME}/adapters/latest"
    headers = {"Authorization": f"Bearer {key}"}
    etag = httpx.get(latest, headers=headers).headers["etag"]
    told = headers | {"If-None-Match": etag}
    arms = {
        "latest": lambda: requests(latest, told, api, seconds),
        "empty": lambda: requests(f"http://127.0.0.1:{BARE}/empty", told, bare, seconds),
    }
    found = alternated(arms)
    rate = {arm: statistics.median(rate for rate, _ in runs) for arm, runs in found.items()}
    report.add("latest with If-None-Match, a core", rate["latest"], "1/s")
    report.add("empty FastAPI endpoint, a core", rate["empty"], "1/s")
    report.add("latest / empty", rate["latest"] / rate["empty"], "ratio", 0.5)


def alternated(arms: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Run the arms in turn, a warm-up first."""
    for arm in arms.values():
        arm()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            found[name].append(arm())
    return found


def download(port: int, path: str, key: str, process: psutil.Process, seconds: float) -> tuple[float, float]:
    """Return bytes a second of the server's processor time, and of wall clock."""
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
    buffer, received = bytearray(1 << 20), 0
    before, start = processor(process), time.monotonic()
    while time.monotonic() - start < seconds:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request.encode())
            while count := connection.recv_into(buffer):
                received += count
    wall = time.monotonic() - start
    return received / max(processor(process) - before, 1e-3), received / wall


def requests(
    url: str, headers: dict[str, str], process: psutil.Process, seconds: float
) -> tuple[float, float]:
    """Return requests a second of the server's processor time, and of wall clock."""
    command = ["wrk", "-t1", "-c16", f"-d{seconds:.0f}s"]
    for name, value in headers.items():
        command += ["-H", f"{name}: {value}"]
    before = processor(process)
    done = subprocess.run([*command, url], capture_output=True, text=True, check=True)
    used = processor(process) - before
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if " requests in " in line}
    count = int(next(iter(lines.values())).split()[0])
    return count / used, count / seconds


def processor(process: psutil.Process) -> float:
    """Return the processor time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
