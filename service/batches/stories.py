"""One trace's whole story: when it came, its grades, its gate, its batches, the version it trained.

Reads only. Knows no HTTP. Invariant: state and reason are those of status (staleness derived from the
head's depth), and a reward comes with the grades and the rule that made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
from sqlalchemy import Connection, text

from service.batches import erasure
from service.database.documents import read_document
from service.database.tables import ROLLOUT_STATES
from service.errors import FieldError, Gone, Invalid, NotFound

_DERIVED = """
CASE WHEN r.state = 'ready' AND r.depth < h.least THEN 'excluded' ELSE r.state END AS gate,
CASE WHEN r.state = 'ready' AND r.depth < h.least THEN 'stale' ELSE r.reason END AS gate_reason
"""
_HEAD = """
head AS (
    SELECT l.head_depth - (s.document #>> '{batching,max_staleness}')::integer AS least
    FROM lineages l JOIN policies p ON p.id = l.policy_id
    JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
    WHERE l.policy_id = :policy
)
"""

_ROLLOUT = text(f"""
WITH {_HEAD}
SELECT r.*, {_DERIVED}, s.document -> 'reward' AS rule, d.normalised
FROM rollouts r CROSS JOIN head h
LEFT JOIN settings_revisions s ON s.policy_id = r.policy_id AND s.revision = r.reward_revision
LEFT JOIN rollout_documents d ON d.rollout_id = r.id
WHERE r.policy_id = :policy AND r.trace_id = :trace
""")  # noqa: S608 - our own expressions

_GRADES = text("SELECT * FROM grades WHERE rollout_id = :id ORDER BY id")

_BATCHES = text("""
SELECT b.number, b.state, b.outcome, b.estimator, b.created_at, b.ended_at, m.position, m.reward, m.baseline,
       m.advantage, m.neighbours, m.neighbours_left_out, m.verdict, m.reason, m.live, v.version, v.tainted,
       (SELECT json_agg(t ORDER BY t.turn) FROM batch_turns t
        WHERE t.batch_id = m.batch_id AND t.rollout_id = m.rollout_id) AS turns
FROM batch_members m JOIN batches b ON b.id = m.batch_id
LEFT JOIN policy_versions v ON v.batch_id = b.id
WHERE m.rollout_id = :id ORDER BY b.number
""")

_NAMES = text("SELECT id, trace_id FROM rollouts WHERE id = ANY(:ids) AND erased_at IS NULL")

# The states are read one by one in the order of one index, so that a page costs a page; where fresh and
# stale ready rollouts are told apart, it costs those of the other kind that lie between, too.
_PAGE = text(f"""
WITH {_HEAD}
SELECT r.id, r.trace_id, r.received_at, r.version, r.status, r.reward, r.task_key, {_DERIVED}
FROM head h, unnest(CAST(:states AS text[]), CAST(:stales AS boolean[])) AS every (state, stale)
CROSS JOIN LATERAL (
    SELECT * FROM rollouts r
    WHERE r.policy_id = :policy AND r.state = every.state
      AND (CAST(:reason AS text) IS NULL OR r.reason = :reason)
      AND (every.stale IS NULL OR (r.depth < h.least) = every.stale)
      AND (CAST(:at AS timestamptz) IS NULL OR (r.received_at, r.id) < (:at, :id))
    ORDER BY r.received_at DESC, r.id DESC LIMIT :limit) AS r
ORDER BY r.received_at DESC, r.id DESC LIMIT :limit
""")  # noqa: S608 - our own expressions


_TURN = ("turn", "reward", "baseline", "advantage", "note")


@dataclass(frozen=True, slots=True)
class Steps:
    """Which of the trace's messages to show: a large trace is read a page at a time."""

    start: int = 0
    limit: int = 50


def story(connection: Connection, policy_id: int, trace_id: str, steps: Steps) -> dict[str, Any]:
    """Tell all about one trace. Raises NotFound, or Gone when it was erased."""
    row = connection.execute(_ROLLOUT, {"policy": policy_id, "trace": trace_id}).one_or_none()
    if row is None:
        if erasure.is_erased(connection, policy_id, trace_id):
            raise Gone(f"Trace {trace_id} was erased")
        raise NotFound(f"There is no trace {trace_id!r}", code="trace_not_found")
    batches = connection.execute(_BATCHES, {"id": row.id}).all()
    grades = connection.execute(_GRADES, {"id": row.id}).all()
    named = names(connection, batches)
    return {
        "trace_id": row.trace_id,
        "state": row.gate or "waiting_for_trace",
        "reason": row.gate_reason,
        "received_at": _moment(row.received_at),
        "first_seen_at": _moment(row.seen_at),
        "waits_until": _moment(row.due_at),
        "status": row.status,
        "task_key": row.task_key,
        "session_id": row.session_id,
        "policy_version": row.version,
        "trainability": {"verdict": row.verdict, "reasons": row.verdict_reasons or []},
        "reward": _reward(row),
        "grades": [_grade(grade, row, batches) for grade in grades],
        "batches": [_batch(batch, named) for batch in batches],
        "trained_version": next((b.version for b in batches if b.live and b.version is not None), None),
        "document": _document(row.normalised, steps),
    }


def page(
    connection: Connection, policy_id: int, *, state: str | None, reason: str | None, cursor: str, limit: int
) -> dict[str, Any]:
    """List traces, newest first, of one state or of all. Raises Invalid for a cursor that is not ours."""
    at, before = _parsed(cursor)
    parts = _parts(state, reason)
    rows = connection.execute(
        _PAGE,
        {
            "policy": policy_id, "states": [stored for stored, _ in parts],
            "stales": [stale for _, stale in parts], "reason": None if reason == "stale" else reason,
            "at": at, "id": before, "limit": limit,
        },
    ).all()  # fmt: skip
    traces = [
        {
            "trace_id": row.trace_id, "state": row.gate, "reason": row.gate_reason, "status": row.status,
            "received_at": _moment(row.received_at), "policy_version": row.version, "reward": row.reward,
            "task_key": row.task_key,
        }
        for row in rows
    ]  # fmt: skip
    more = f"{rows[-1].received_at.timestamp():.6f}_{rows[-1].id}" if len(rows) == limit else None
    return {"traces": traces, "next_cursor": more}


def names(connection: Connection, members: Sequence[Any]) -> dict[int, str]:
    """Return the trace ids of all neighbours of these members; erased ones have none."""
    ids = {pair[0] for member in members for pair in member.neighbours}
    return {row.id: row.trace_id for row in connection.execute(_NAMES, {"ids": sorted(ids)})}


def neighbours(member: Any, named: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return a member's neighbours as the API shows them, heaviest first."""
    return [{"trace_id": named.get(rollout), "weight": weight} for rollout, weight in member.neighbours]


def _parts(state: str | None, reason: str | None) -> list[tuple[str, bool | None]]:
    """Return the stored states to read, and whether only those that are stale, or only those that are not.

    A stale rollout is stored as ready; it is shown, and counted by status, as excluded.
    """
    if reason == "stale":
        return [("ready", True)] if state in (None, "excluded") else []
    if state == "ready":
        return [("ready", False)]
    if state == "excluded" and reason is None:
        return [("excluded", None), ("ready", True)]
    return [(stored, None) for stored in ([state] if state else ROLLOUT_STATES)]


def _reward(row: Any) -> dict[str, Any] | None:
    if row.reward is None:
        return None
    return {
        "value": row.reward,
        "settings_revision": row.reward_revision,
        "rule": row.rule,
        "rewarded_at": _moment(row.rewarded_at),
        "grades_used": len(row.reward_grades or ()),
    }


def _grade(grade: Any, row: Any, batches: Any) -> dict[str, Any]:
    held = [batch.created_at for batch in batches if batch.live]
    of_turns = {
        id_ for batch in batches if batch.live for turn in batch.turns or () for id_ in turn["grade_ids"]
    }
    used = grade.id in (row.reward_grades or ()) or grade.id in of_turns
    return {
        "grader": grade.grader, "name": grade.name, "turn": grade.turn, "value": grade.value,
        "sent_value": grade.sent_value, "void": grade.value is None, "grader_version": grade.grader_version,
        "criteria": _json(grade.criteria), "comment": _json(grade.comment),
        "graded_at": _moment(grade.graded_at), "received_at": _moment(grade.received_at),
        "current": grade.current, "counts": used,
        "late": not used and any(grade.received_at > created for created in held),
    }  # fmt: skip


def _batch(batch: Any, named: Mapping[int, str]) -> dict[str, Any]:
    return {
        "number": batch.number, "state": batch.state, "outcome": batch.outcome,
        "estimator": batch.estimator, "created_at": _moment(batch.created_at),
        "ended_at": _moment(batch.ended_at), "reward": batch.reward, "baseline": batch.baseline,
        "advantage": batch.advantage, "neighbours": neighbours(batch, named),
        "neighbours_left_out": batch.neighbours_left_out, "verdict": batch.verdict,
        "reason": batch.reason, "version": batch.version if batch.live else None,
        "tainted": list(batch.tainted or ()),
        "turns": [{name: turn[name] for name in _TURN} for turn in batch.turns or ()],
    }  # fmt: skip


def _document(stored: bytes | None, steps: Steps) -> dict[str, Any] | None:
    if stored is None:
        return None
    document = read_document(stored)
    messages = document.pop("messages", [])
    shown = messages[steps.start : steps.start + steps.limit]
    end = steps.start + len(shown)
    calls = [call for call in document.pop("calls", []) if steps.start <= call["message_index"] < end]
    return {
        **document, "messages": shown, "calls": calls, "messages_total": len(messages),
        "next_step": end if end < len(messages) else None,
    }  # fmt: skip


def _json(stored: bytes | None) -> Any:
    return None if stored is None else orjson.loads(stored)


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _parsed(cursor: str) -> tuple[datetime | None, int]:
    if not cursor:
        return None, 0
    try:
        at, _, before = cursor.partition("_")
        return datetime.fromtimestamp(float(at), UTC), int(before)
    except (ValueError, OverflowError) as error:
        raise Invalid("", [FieldError("/cursor", "is not one that a list gave")]) from error
