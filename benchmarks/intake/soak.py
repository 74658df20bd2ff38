"""Memory under overload: full rate against a database that takes writes a tenth of the time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import text

from benchmarks.intake import documents
from benchmarks.intake.servers import Installation, Process, running, start_api
from benchmarks.intake.wrk import load_batches
from benchmarks.report import Report

CONNECTIONS = 256
BATCH = 100
HELD_SECONDS, FREE_SECONDS = 0.9, 0.1


def measure(report: Report, where: Installation, seconds: float) -> None:
    """Send more than the queue may hold and watch the process's memory."""
    with running(start_api(where)) as api, _throttled(where), _watched(api) as seen:
        sent = load_batches(
            api.url, where.key, documents.trace, BATCH, connections=CONNECTIONS, seconds=seconds, run="soak"
        )
    report.add("soak under a throttled database", seconds, "s")
    report.add("traces that were sent meanwhile", sent.requests * BATCH, "traces")
    report.add("requests answered 503 meanwhile", sent.refused, "requests", 1)
    report.add("peak RSS of the api meanwhile", max(seen) / 1e6, "MB", 300, "less")


@contextmanager
def _throttled(where: Installation) -> Iterator[None]:
    stop = threading.Event()

    def hold() -> None:
        while not stop.wait(FREE_SECONDS):
            with where.engine.connect() as connection:
                connection.execute(text("LOCK TABLE rollouts IN EXCLUSIVE MODE"))
                stop.wait(HELD_SECONDS)
                connection.rollback()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def _watched(api: Process) -> Iterator[list[int]]:
    seen: list[int] = [api.rss_bytes]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            seen.append(api.rss_bytes)

    thread = threading.Thread(target=watch)
    thread.start()
    started = time.monotonic()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
        print(f"  RSS every fifth of the run, MB: {_fifths(seen)} ({time.monotonic() - started:.0f} s)")


def _fifths(seen: list[int]) -> list[int]:
    step = max(1, len(seen) // 5)
    return [round(max(seen[at : at + step]) / 1e6) for at in range(0, len(seen), step)]
