"""Batches of 100 over HTTP against psycopg writing the same rows and bytes, 64 traces a commit."""

import time
from statistics import median
from typing import Any

import psycopg

from benchmarks.intake import documents
from benchmarks.intake.servers import Installation, Process
from benchmarks.intake.wrk import load_batches
from benchmarks.report import Report
from service.ingest import rollouts
from service.ingest.formats import native
from service.schemas import Trace

BATCH = 100
PER_COMMIT = 64
CONNECTIONS = 4

_ROLLOUT = """
INSERT INTO rollouts (id, policy_id, trace_id, arrival, canonicaliser, fingerprint, received_at, status,
                      task_key, version, depth, verdict, verdict_reasons, state, reason)
OVERRIDING SYSTEM VALUE
VALUES (%s, %s, %s, %s, 1, %b, clock_timestamp(), 'completed',
        %s, 0, 0, 'text', '{}', 'waiting_reward', 'no_grade')
"""
_DOCUMENT = """
INSERT INTO rollout_documents (rollout_id, policy_id, received_at, raw, normalised)
VALUES (%s, %s, clock_timestamp(), %b, %b)
"""
_FEATURES = """
INSERT INTO rollout_features
    (rollout_id, features, text_digest, content_digest, opening_digest, prompt_digests)
VALUES (%s, %b, %b, %b, %b, %b)
"""


def measure(report: Report, where: Installation, api: Process, seconds: float, repeats: int) -> None:
    """Alternate both; report the median of ratios."""
    runs = []
    for number in range(repeats):
        written = _write_plainly(where, seconds, number)
        sent = load_batches(
            api.url,
            where.key,
            documents.trace,
            BATCH,
            connections=CONNECTIONS,
            seconds=seconds,
            run=f"batch-{number}",
        )
        runs.append((sent.rate * BATCH, written, sent.refused + sent.broken))
    report.add("psycopg, the same rows and bytes, 64 a commit", median(run[1] for run in runs), "traces/s")
    report.add("traces in batches of 100, 4 connections", median(run[0] for run in runs), "traces/s")
    ratio = median(sent / written for sent, written, _ in runs)
    report.add("batches of 100 over psycopg", ratio, "ratio", 0.4)
    report.add("batch requests refused or broken", sum(run[2] for run in runs), "requests", 0, "less")


def _write_plainly(where: Installation, seconds: float, number: int) -> float:
    """Insert rows that were made beforehand, in pipelines, and return traces a second."""
    pool = [_columns(where, f"plain-{number}-{at}") for at in range(PER_COMMIT)]
    url = where.postgres.url().replace("postgresql+psycopg", "postgresql")
    done = 0
    with psycopg.connect(url, options="-c synchronous_commit=on -c jit=off") as connection:
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            _commit(connection, where.policy_id, pool, f"plain-{number}-{done}")
            done += PER_COMMIT
        return done / (time.monotonic() - started)


def _commit(
    connection: psycopg.Connection[Any], policy: int, pool: list[rollouts.Columns], name: str
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT nextval(pg_get_serial_sequence('rollouts', 'id')) FROM generate_series(1, %s)",
            [PER_COMMIT],
        )
        ids = [row[0] for row in cursor]
        rows = list(zip(ids, pool, strict=True))
        cursor.executemany(
            _ROLLOUT, [(at, policy, f"{name}-{at}", at, c.fingerprint, c.task_key) for at, c in rows]
        )
        cursor.executemany(_DOCUMENT, [(at, policy, c.raw, c.normalised) for at, c in rows])
        cursor.executemany(
            _FEATURES,
            [
                (at, c.features, c.text_digest, c.content_digest, c.opening_digest, c.prompt_digests)
                for at, c in rows
            ],
        )
    connection.commit()


def _columns(where: Installation, trace_id: str) -> rollouts.Columns:
    document = documents.trace(trace_id)
    return rollouts.prepare(
        native.validate(Trace, document), documents.encoded(document),
        policy_id=where.policy_id, policy=documents.POLICY, key=b"k" * 32,
    ).columns()  # fmt: skip
