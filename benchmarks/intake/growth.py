"""Growth: intake with a long history present against intake on an empty database, side by side."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import httpx
from sqlalchemy import text

from benchmarks.intake import documents
from benchmarks.intake.servers import Installation, running, start_api
from benchmarks.intake.single import TRACE
from benchmarks.intake.wrk import load
from benchmarks.report import Report
from service.database.engine import transaction

CHUNK = 50_000
STATUS_CALLS = 30
_ROLLOUTS = """
INSERT INTO rollouts (policy_id, trace_id, arrival, canonicaliser, fingerprint, received_at, seen_at, status,
                      task_key, version, depth, verdict, verdict_reasons, state, reason, reward, rewarded_at)
SELECT :policy, 'old-' || md5(n::text), n, 1, decode(md5(n::text), 'hex'), now(), now(), 'completed',
       'features:' || md5(n::text), 0, 0, 'text', '{}',
       CASE WHEN n % 10 = 0 THEN 'waiting_reward' ELSE 'excluded' END,
       CASE WHEN n % 10 = 0 THEN 'no_grade' ELSE 'stale' END,
       CASE WHEN n % 10 <> 0 THEN 0.5 END, CASE WHEN n % 10 <> 0 THEN now() END
FROM generate_series(CAST(:first AS bigint), :last) n
"""
_REST = """
WITH old AS (SELECT id, policy_id, received_at, reward FROM rollouts WHERE arrival BETWEEN :first AND :last),
documents AS (
    INSERT INTO rollout_documents (rollout_id, policy_id, received_at, raw, normalised)
    SELECT id, policy_id, received_at, decode(repeat(md5(id::text), 8), 'hex'), decode(md5(id::text), 'hex')
    FROM old
), features AS (
    INSERT INTO rollout_features
        (rollout_id, features, text_digest, content_digest, opening_digest, prompt_digests)
    SELECT id, decode(md5(id::text), 'hex'), decode(md5(id::text), 'hex'), '', '', '' FROM old
)
INSERT INTO grades (rollout_id, grader, name, value, current)
SELECT id, 'g', 'overall', reward, true FROM old WHERE reward IS NOT NULL
"""


def measure(
    report: Report, empty: Installation, grown: Installation, *, rows: int, seconds: float, repeats: int
) -> None:
    """Fill one of two databases on like servers, then alternate runs on both."""
    _fill(grown, rows)
    for where in (empty, grown):
        where.tidy()
    runs = []
    for number in range(repeats):
        rates = [_rate(where, seconds, f"growth-{number}") for where in (empty, grown)]
        runs.append(rates[1] / rates[0])
    report.add("rollouts present", grown.count("rollouts"), "rollouts")
    report.add("intake rate with them over that on an empty database", median(runs), "ratio", 0.9)
    report.add("median of `status` with them", _status_ms(grown), "ms", 50, "less")


def _rate(where: Installation, seconds: float, run: str) -> float:
    with running(start_api(where)) as api:
        load(api.url, "/v1/traces", where.key, TRACE, connections=64, seconds=1, run=f"{run}-warm")
        return load(api.url, "/v1/traces", where.key, TRACE, connections=64, seconds=seconds, run=run).rate


def _status_ms(where: Installation) -> float:
    path = f"/v1/policies/{documents.POLICY}/status"
    with running(start_api(where)) as api, httpx.Client(base_url=api.url) as client:
        times = [_timed(client, path, where.key) for _ in range(STATUS_CALLS)]
    return median(times) * 1000


def _timed(client: httpx.Client, path: str, key: str) -> float:
    started = time.perf_counter()
    client.get(path, headers={"Authorization": f"Bearer {key}"}).raise_for_status()
    return time.perf_counter() - started


def _fill(where: Installation, rows: int) -> None:
    with _without_sync(where):
        for first in range(1, rows + 1, CHUNK):
            chunk = {"first": first, "last": min(first + CHUNK - 1, rows)}
            with transaction(where.engine) as connection:
                connection.execute(text(_ROLLOUTS), {"policy": where.policy_id, **chunk})
                connection.execute(text(_REST), chunk)


@contextmanager
def _without_sync(where: Installation) -> Iterator[None]:
    """Fill fast; what is measured later runs with fsync on."""
    for value in ("off", "on"):
        with where.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"ALTER SYSTEM SET fsync = {value}"))
            connection.execute(text("SELECT pg_reload_conf()"))
        if value == "off":
            yield
