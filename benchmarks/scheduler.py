"""`python -m benchmarks.scheduler`: forming a batch and `status`, with 10,000 and with 1,000,000 rollouts.

Issue 5's bounds: medians under 50 ms with 1,000,000 rollouts of which 100,000 are ready, and at most
twice what 10,000 take. Embedding is left out: vectors are in the cache before a batch is timed. Also
what the maintained counts cost intake: grades a second with and without their triggers.
"""

import argparse
import hashlib
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import orjson
import structlog
import zstandard
from numpy.typing import NDArray
from sqlalchemy import Engine, text

from benchmarks.report import Report
from service.batches import assembly, counts, history, status
from service.batches.outlook import outlook
from service.batches.scheduler import Scheduler
from service.database import engine as database
from service.database import migrate, policies
from service.database.embedded import EmbeddedPostgres
from service.database.engine import transaction
from service.ingest import grades, rollouts
from service.ingest.formats import native
from service.ingest.writer import Item, Writer
from service.policies import PolicySettings
from service.schemas import Grade, Trace

HEAD = 40
DIMENSIONS = 384

# A tenth is ready (a fifth of that stale), most is history, the rest waits or is excluded.
_ROLLOUTS = """
INSERT INTO rollouts (policy_id, trace_id, seen_at, arrival, canonicaliser, fingerprint, received_at, status,
    task_key, version, depth, verdict, verdict_reasons, state, reason, reward, reward_revision,
    reward_grades, rewarded_at, ready_at, gate_epoch)
SELECT :policy, 'trace-' || n, at, n, 1, sha256(n::text::bytea), at, 'completed', 'features:' || md5(n::text),
    depth, depth, 'text', '{}', state,
    CASE state WHEN 'trained' THEN 'version ' || depth WHEN 'excluded' THEN 'untrainable:no_version'
               WHEN 'waiting_reward' THEN 'no_grade' ELSE '' END,
    CASE WHEN state IN ('ready', 'trained') THEN (n % 11) / 10.0 END, 1, '{1}',
    CASE WHEN state IN ('ready', 'trained') THEN at END, CASE WHEN state = 'ready' THEN at END,
    CASE WHEN state <> 'waiting_reward' THEN 1 END
FROM (
    SELECT n, now() - make_interval(secs => (:count - n) / 100.0) AS at,
           CASE n % 10 WHEN 0 THEN 'ready' WHEN 1 THEN 'waiting_reward' WHEN 2 THEN 'waiting_reward'
                       WHEN 3 THEN 'excluded' ELSE 'trained' END AS state,
           CASE WHEN n % 50 = 0 THEN 10 ELSE :head - n % 9 END AS depth
    FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n) AS made
"""

_FEATURES = """
INSERT INTO rollout_features
    (rollout_id, features, text_digest, content_digest, opening_digest, prompt_digests)
SELECT id, :features, sha256(id::text::bytea), sha256(id::text::bytea), sha256(id::text::bytea), ''
FROM rollouts WHERE policy_id = :policy AND (state = 'ready' OR id > (SELECT max(id) FROM rollouts) - 5000)
"""


class Encoder:
    """Unit vectors from a text's hash."""

    name = "hashing"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one row a text."""
        rows = []
        for each in texts:
            seed = int.from_bytes(hashlib.sha256(each.encode()).digest()[:8])
            row = np.random.default_rng(seed).standard_normal(DIMENSIONS)
            rows.append(row / np.linalg.norm(row))
        return np.array(rows, dtype=np.float32)


def main() -> int:
    """Measure and write benchmarks/results/scheduler.json."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rollouts", type=int, default=1_000_000)
    options.add_argument("--repetitions", type=int, default=21)
    chosen = options.parse_args()
    # One log line a batch would hide the table.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    report = Report("scheduler", "python -m benchmarks.scheduler")
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(
            Path(folder) / "data",
            options=("-c", "fsync=off", "-c", "shared_buffers=512MB", "-c", "max_wal_size=4GB"),
        )
        try:
            engine = database.connect(server.url(), name="benchmark")
            migrate.upgrade(engine)
            sizes = (10_000, chosen.rollouts)
            filled = [_fill(engine, f"policy-{count}", count) for count in sizes]
            small, large = _measure(engine, filled, chosen.repetitions)
            _report(report, small, large, chosen.rollouts)
            with transaction(engine) as connection:
                policies.revise(connection, filled[1], {"baseline": {"estimator": "leave_one_out"}})
            (plain,) = _measure(engine, filled[1:], chosen.repetitions)
            report.add("the same batch with the batch mean for a baseline", plain["form"], "ms")
            report.add("and the machine's load, in processes per processor", _load(), "")
            _measure_intake(engine, report)
            engine.dispose()
        finally:
            server.stop()
    return int(not report.write())


def _measure(engine: Engine, policies_filled: list[int], repetitions: int) -> list[dict[str, float]]:
    """Return medians in milliseconds of each policy; they take turns, so that noise meets both alike."""
    scheduler = Scheduler(engine, Encoder(), interval_seconds=1)
    scheduler.tick()

    def form(policy: int) -> None:
        assert scheduler.form(policy) is not None

    def read_status(policy: int) -> None:
        with transaction(engine) as connection:
            status.policy_status(connection, policy)

    taken: list[dict[str, list[float]]] = [{"form": [], "cpu": [], "status": []} for _ in policies_filled]
    for _ in range(repetitions):
        for policy, times in zip(policies_filled, taken, strict=True):
            _embed_ahead(engine, policy)
            before = time.process_time()
            times["form"].append(_milliseconds(lambda: form(policy)))  # noqa: B023
            times["cpu"].append((time.process_time() - before) * 1000)
            for _ in range(3):
                times["status"].append(_milliseconds(lambda: read_status(policy)))  # noqa: B023
    return [{name: statistics.median(found) for name, found in times.items()} for times in taken]


def _fill(engine: Engine, name: str, count: int) -> int:
    settings = PolicySettings.model_validate(
        {"base_model": "smollm2-135m", "batching": {"max_ready_batches": 1_000_000}}
    )
    described = orjson.dumps({"text": f"a task of {name}", "prompt_length": 100, "context": {}})
    with transaction(engine) as connection:
        policy = policies.create(connection, name, settings)
        step = 100_000
        for first in range(1, count + 1, step):
            last = min(first + step - 1, count)
            connection.execute(
                text(_ROLLOUTS),
                {"policy": policy, "first": first, "last": last, "head": HEAD, "count": count},
            )
        features = zstandard.ZstdCompressor().compress(described)
        connection.execute(text(_FEATURES), {"policy": policy, "features": features})
        connection.execute(
            text("""INSERT INTO policy_versions (policy_id, version, parent, depth, fencing_token, folder)
                    SELECT :policy, n, n - 1, n, 0, 'v' || n FROM generate_series(1, :head) AS n"""),
            {"policy": policy, "head": HEAD},
        )
        connection.execute(
            text("""UPDATE lineages SET head_version = :head, head_depth = :head, promoted_version = :head
                    WHERE policy_id = :policy"""),
            {"policy": policy, "head": HEAD},
        )
        counts.fold(connection)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    return policy


def _embed_ahead(engine: Engine, policy: int) -> None:
    """Put the vectors of the next batch and its history into the cache, each of its own."""
    with transaction(engine) as connection:
        view = outlook(connection, policy)
        needed = assembly.needed_rollouts(connection, view)
        missing = list(history.missing_texts(connection, needed, Encoder.name))
        vectors = Encoder().encode([digest.hex() for digest in missing]) if missing else []
        stored = {digest: vector.tobytes() for digest, vector in zip(missing, vectors, strict=True)}
        history.remember(connection, needed, Encoder.name, stored)


def _load() -> float:
    """Return what a time measured here has to be read with: 1 means that nobody waits for a processor."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _milliseconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return (time.perf_counter() - started) * 1000


def _report(report: Report, small: dict[str, float], large: dict[str, float], count: int) -> None:
    names = {"form": "forming a batch of 32, without embedding", "status": "status"}
    for key, name in names.items():
        report.add(f"{name}: 10,000 rollouts", small[key], "ms")
        report.add(f"{name}: {count:,} rollouts, a tenth ready", large[key], "ms", 50.0, "less")
        report.add(f"{name}: growth", large[key] / small[key], "x", 2.0, "less")
    report.add("of forming a batch, processor time of the scheduler itself", large["cpu"], "ms")


def _measure_intake(engine: Engine, report: Report) -> None:
    """Write groups of traces with their grades, with and without the triggers, taking turns."""
    with transaction(engine) as connection:
        policy = policies.create(
            connection, "intake", PolicySettings.model_validate({"base_model": "smollm2-135m"})
        )
    settings = PolicySettings.model_validate({"base_model": "smollm2-135m"})
    taken: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(60):
        counted = turn % 2 == 0
        with transaction(engine) as connection:
            verb = "ENABLE" if counted else "DISABLE"
            for table in ("rollouts", "grades"):
                connection.execute(text(f"ALTER TABLE {table} {verb} TRIGGER USER"))
        items = _items(policy, settings, turn)
        taken[counted].append(_milliseconds(lambda: Writer(engine).write(items)))  # noqa: B023
    # The lower quartile: what other processes of this machine take is not intake's.
    plain, counting = (statistics.quantiles(taken[counted], n=4)[0] for counted in (False, True))
    report.add("intake, 200 traces and grades in one transaction", counting, "ms")
    report.add("the same without counting", plain, "ms")
    report.add("counting slows intake by", 100 * (counting / plain - 1), "%")


def _items(policy: int, settings: PolicySettings, turn: int) -> list[Item]:
    items: list[Item] = []
    for number in range(200):
        trace_id = f"intake-{turn}-{number}"
        trace = {
            "trace_id": trace_id, "policy_version": 0,
            "messages": [
                {"role": "user", "content": f"task {trace_id}"}, {"role": "assistant", "content": "yes"},
            ],
        }  # fmt: skip
        items.append(
            rollouts.prepare(
                native.validate(Trace, trace), b"{}", policy_id=policy, policy="intake", key=b"k"
            )
        )
        graded = {"trace_id": trace_id, "grader": "g", "value": 0.5}
        items.append(grades.prepare(native.validate(Grade, graded), policy_id=policy, rule=settings.reward))
    return items


if __name__ == "__main__":
    sys.exit(main())
