"""Plan guards: with 40,000 rollouts present, no hot statement reads history; EXPLAIN says how it would."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from service.batches import erasure, gates, stories
from service.database.engine import connect, transaction
from service.ingest import retention
from service.ingest.writer import Writer
from tests.conftest import MakePolicy
from tests.documents import grade, trace
from tests.service.ingest.conftest import new_grade, new_trace

ROWS = 40_000
FILL = """
INSERT INTO rollouts (policy_id, trace_id, arrival, canonicaliser, fingerprint, received_at, status, task_key,
                      version, depth, verdict, state, reason, reward, rewarded_at)
SELECT :policy, 'old-' || n, n, 1, '\\x00', now(), 'completed', 'k' || n,
       0, 0, 'text', 'trained', '', 0.5, now()
FROM generate_series(1, :rows) n;
"""
FILL_DOCUMENTS = """
INSERT INTO rollout_documents (rollout_id, policy_id, received_at, raw, normalised)
SELECT id, policy_id, received_at - interval '9 days', '\\x00', '\\x00' FROM rollouts
"""
FILL_FEATURES = """
INSERT INTO rollout_features (rollout_id, features, text_digest, content_digest, opening_digest,
                              prompt_digests)
SELECT id, '\\x00', sha256(trace_id::bytea), '\\x00', '\\x00', '\\x00' FROM rollouts
"""
FILL_GRADES = """
INSERT INTO grades (rollout_id, grader, name, value, current)
SELECT id, 'g', 'overall', 0.5, true FROM rollouts
"""


@pytest.fixture
def grown(engine: Engine, make_policy: MakePolicy) -> int:
    """A policy with a long history; returns its id."""
    policy = make_policy(retention={"raw_days": 1}).id
    with transaction(engine) as connection:
        connection.execute(text(FILL), {"policy": policy, "rows": ROWS})
        connection.execute(text(FILL_DOCUMENTS))
        connection.execute(text(FILL_FEATURES))
        connection.execute(text(FILL_GRADES))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    return policy


def scans(plan: Any) -> Iterator[tuple[str, str]]:
    """Every (kind of scan, table) of a plan."""
    if isinstance(plan, list):
        for part in plan:
            yield from scans(part)
    elif isinstance(plan, dict):
        if "Relation Name" in plan and "Scan" in plan.get("Node Type", ""):
            yield plan["Node Type"], plan["Relation Name"]
        for part in plan.values():
            yield from scans(part)


def plans(engine: Engine, act: Any) -> list[tuple[str, Any]]:
    """EXPLAIN every statement that `act` makes, in its own transaction, just before it runs."""
    found: list[tuple[str, Any]] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if statement.lstrip().startswith(("EXPLAIN", "SAVEPOINT", "RELEASE")):
            return
        cursor.execute("EXPLAIN (FORMAT JSON) " + statement, parameters)
        row = cursor.fetchone()[0]
        found.append((statement, json.loads(row) if isinstance(row, str) else row))

    event.listen(engine, "before_cursor_execute", explain)
    try:
        act()
    finally:
        event.remove(engine, "before_cursor_execute", explain)
    return found


BIG = {"rollouts", "rollout_documents", "rollout_features", "grades"}


def whole_reads(found: list[tuple[str, Any]]) -> list[str]:
    return [
        statement
        for statement, plan in found
        for kind, table in scans(plan)
        if kind == "Seq Scan" and table in BIG
    ]


def write(engine: Engine, policy: int, graded: str) -> None:
    """What intake does: new traces, their grades, a revision of `graded`, a duplicate."""
    writer, documents = Writer(engine), [trace() for _ in range(20)]
    writer.write([new_trace(policy, document) for document in documents])
    writer.write([new_grade(policy, grade(document["trace_id"], 0.5)) for document in documents])
    writer.write([new_grade(policy, grade(graded, 0.25)), new_trace(policy, documents[0])])


def test_no_hot_statement_reads_history(engine: Engine, grown: int) -> None:
    def retain() -> None:
        next(retention.remove_expired(engine, batch_rows=100))

    def evaluate() -> None:
        with transaction(engine) as connection:
            gates.evaluate_due(connection)

    def list_traces() -> None:
        with transaction(engine) as connection:
            for state in (None, "ready", "excluded"):
                stories.page(connection, grown, state=state, reason=None, cursor="", limit=50)

    def erase() -> None:
        with transaction(engine) as connection:
            erasure.erase(connection, grown, "old-6")

    for act, least in (
        (lambda: write(engine, grown, "old-5"), 6), (retain, 2), (evaluate, 1), (list_traces, 3), (erase, 10),
    ):  # fmt: skip
        found = plans(engine, act)
        assert len(found) >= least
        assert whole_reads(found) == []


def test_plans_that_intake_makes_while_its_tables_are_small_read_none_whole(
    database_url: str, make_policy: MakePolicy
) -> None:
    policy, writing = make_policy().id, connect(database_url, name="intake", by_key=True)
    write(writing, policy, "new-5")
    with writing.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    assert whole_reads(plans(writing, lambda: write(writing, policy, "new-5"))) == []
    writing.dispose()
