"""Ten thousand long-polls of `latest` waiting on one api process: what they cost, and how soon all are told.

    python -m benchmarks.pollers [--pollers 10000] [--seconds 10]

Database work is counted in transactions of the server (pg_stat_database), the api's own heartbeat
(keys, policies and pointers, read a few times a second whoever polls) beside it. Each poller is a
connection with one `?unless=1&wait=60` in flight; version 2 is published, and every answer is read.
Writes benchmarks/results/pollers.json.
"""

import argparse
import asyncio
import resource
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
from sqlalchemy import Engine, text

from benchmarks.adapters import API, NAME, processor, published, server
from benchmarks.report import Report, fail
from service.database import engine as database
from service.database.engine import transaction

CONNECTING = 200
"""Connections made at once."""
SPARE_FILES = 200
REQUEST = (
    f"GET /v1/policies/{NAME}/adapters/latest?unless=1&wait=60 HTTP/1.1\r\n"
    "Host: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pollers", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    wanted = parser.parse_args()
    count = min(wanted.pollers, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES)
    report = Report("pollers", f"python -m benchmarks.pollers --pollers {wanted.pollers}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="yoro-bench-")))
        folder.chmod(0o755)
        key, url = stack.enter_context(published(folder, 1))
        environment = {"YORO_DATABASE_URL": url, "YORO_DATA": str(folder)}
        api = stack.enter_context(
            server([sys.executable, "-m", "yoro", "api", "--port", str(API)], API, **environment)
        )
        engine = database.connect(url, name="bench")
        stack.callback(engine.dispose)
        asyncio.run(measure(report, engine, api, key, count=count, seconds=wanted.seconds))
    sys.exit(0 if report.write() else 1)


async def measure(
    report: Report, engine: Engine, api: psutil.Process, key: str, *, count: int, seconds: float
) -> None:
    """Let `count` pollers wait for `seconds`, publish, and read every answer."""
    alone = await transactions(engine, seconds)
    memory = api.memory_info().rss
    connecting = asyncio.Semaphore(CONNECTING)
    request = REQUEST.format(key=key).encode()
    pollers = [asyncio.create_task(poll(request, connecting)) for _ in range(count)]
    await _all_wait(api, count)
    memory = api.memory_info().rss - memory
    before = processor(api)
    waiting = await transactions(engine, seconds)
    used = (processor(api) - before) / seconds
    early = sum(poller.done() for poller in pollers)
    start = time.monotonic()
    publish(engine)
    others = asyncio.create_task(longest_wait(pollers))
    told = sorted([at - start for at, version in await asyncio.gather(*pollers) if version == 2])
    report.add("pollers waiting at once", count - early, "", 10_000)
    report.add("database transactions a second, nobody waiting", alone, "1/s")
    report.add("database transactions a second, all waiting", waiting, "1/s")
    report.add("more of them for each poller", max(0.0, waiting - alone) / count, "1/s", 0.001, "less")
    report.add("processor of the api, all waiting", 100 * used, "% of a core")
    report.add("memory of the api for each poller", memory / count / 1024, "KiB")
    report.add("answered with the new version", len(told) / count, "ratio", 1.0)
    report.add("publication to the first answer", told[0], "s")
    report.add("publication to the median answer", statistics.median(told), "s")
    report.add("publication to the last answer", told[-1], "s")
    report.add("longest wait of another request meanwhile", await others, "s")


async def poll(request: bytes, connecting: asyncio.Semaphore) -> tuple[float, int]:
    """Send one long-poll; return when it was answered, and with which version."""
    async with connecting:
        reader, writer = await asyncio.open_connection("127.0.0.1", API)
        writer.write(request)
        await writer.drain()
    answer = await reader.read()
    at = time.monotonic()
    writer.close()
    return at, 2 if b'"version":2,' in answer else 0


async def longest_wait(pollers: list[asyncio.Task[tuple[float, int]]]) -> float:
    """Ask for /healthz again and again until all pollers are told; return the longest that it took."""
    longest = 0.0
    while not all(poller.done() for poller in pollers):
        start = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", API)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.read()
        writer.close()
        longest = max(longest, time.monotonic() - start)
    return longest


async def _all_wait(api: psutil.Process, count: int) -> None:
    """Return once the api holds all connections and has nothing more to do."""
    for _ in range(400):
        busy = processor(api)
        await asyncio.sleep(0.1)
        if api.num_fds() > count and processor(api) - busy < 0.03:
            return
    fail(f"{api.num_fds()} connections came of {count}")


async def transactions(engine: Engine, seconds: float) -> float:
    """Return the database's transactions a second, without those that ask."""
    before, start = _transactions(engine), time.monotonic()
    await asyncio.sleep(seconds)
    return (_transactions(engine) - before - 1) / (time.monotonic() - start)


def _transactions(engine: Engine) -> int:
    counted = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    with transaction(engine) as connection:
        return int(connection.execute(text(counted)).scalar_one())


def publish(engine: Engine) -> None:
    """Make version 2, of the first one's files, the head."""
    with transaction(engine) as connection:
        connection.execute(
            text("""INSERT INTO policy_versions (policy_id, version, parent, depth, fencing_token, folder,
                        manifest, manifest_sha256)
                    SELECT policy_id, 2, 1, 2, 1, folder || '-again', manifest, manifest_sha256
                    FROM policy_versions WHERE version = 1""")
        )
        connection.execute(text("UPDATE lineages SET head_version = 2, promoted_version = 2"))


if __name__ == "__main__":
    main()
