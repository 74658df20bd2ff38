"""Batches and steps as people read them: members, rewards, baselines, advantages, what became of them.

Reads only; knows no HTTP.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, text

from service.batches.stories import names, neighbours
from service.errors import NotFound

_BATCH = text("""
SELECT b.*, v.version, v.tainted FROM batches b LEFT JOIN policy_versions v ON v.batch_id = b.id
WHERE b.policy_id = :policy AND b.number = :number
""")

_MEMBERS = text("""
SELECT m.*, CASE WHEN r.erased_at IS NULL THEN r.trace_id END AS trace_id, r.version AS sampled_by,
       r.late_grades
FROM batch_members m JOIN rollouts r ON r.id = m.rollout_id WHERE m.batch_id = :batch ORDER BY m.position
""")

_STEPS = text("""
SELECT b.number, b.state, b.outcome, b.size, b.estimator, b.ended_at, b.metrics, v.version, v.parent,
       v.tainted
FROM batches b LEFT JOIN policy_versions v ON v.batch_id = b.id
WHERE b.policy_id = :policy AND b.state IN ('trained', 'no_step') AND b.number < :before
ORDER BY b.number DESC LIMIT :limit
""")


def batch(connection: Connection, policy_id: int, number: int) -> dict[str, Any]:
    """Return one batch with its members. Raises NotFound."""
    row = connection.execute(_BATCH, {"policy": policy_id, "number": number}).one_or_none()
    if row is None:
        raise NotFound(f"There is no batch {number}", code="batch_not_found")
    members = connection.execute(_MEMBERS, {"batch": row.id}).all()
    named = names(connection, members)
    return {
        "number": row.number, "state": row.state, "outcome": row.outcome, "size": row.size,
        "settings_revision": row.settings_revision, "estimator": row.estimator,
        "parameters": row.parameters, "created_at": row.created_at.isoformat(),
        "ended_at": None if row.ended_at is None else row.ended_at.isoformat(),
        "attempts": row.attempts, "failures": row.failures, "deaths": row.deaths,
        "diagnosis": row.diagnosis, "metrics": row.metrics, "version": row.version,
        "tainted": list(row.tainted or ()), "members": [_member(member, named) for member in members],
    }  # fmt: skip


def steps(connection: Connection, policy_id: int, *, before: int, limit: int) -> dict[str, Any]:
    """Return ended batches below a number, newest first, with their metrics."""
    rows = connection.execute(_STEPS, {"policy": policy_id, "before": before, "limit": limit}).all()
    found = [
        {
            "batch": row.number, "outcome": row.outcome or "trained", "size": row.size,
            "estimator": row.estimator, "ended_at": row.ended_at.isoformat(), "version": row.version,
            "parent": row.parent, "tainted": list(row.tainted or ()), "metrics": row.metrics or {},
        }
        for row in rows
    ]  # fmt: skip
    return {"steps": found, "next_cursor": rows[-1].number if len(rows) == limit else None}


def _member(member: Any, named: Mapping[int, str]) -> dict[str, Any]:
    return {
        "trace_id": member.trace_id, "task_key": member.task_key, "policy_version": member.sampled_by,
        "live": member.live, "reward": member.reward, "baseline": member.baseline,
        "advantage": member.advantage, "neighbours": neighbours(member, named),
        "neighbours_left_out": member.neighbours_left_out, "verdict": member.verdict,
        "reason": member.reason, "late_grades": member.late_grades,
    }  # fmt: skip
