"""Quarantine of a grader: its grades stop counting, what was made of them is marked.

Must run inside the caller's transaction. Invariants: no grade is changed or lost, so that lifting
restores what was; a batch not yet claimed that rests on such a grade is dissolved, one being trained
makes a version that is tainted at birth (outcomes.py) or, if it comes to be claimed again, is dissolved
then (claims.py); versions trained on them, and those grown from them, are tainted, and stay so when the
quarantine is lifted. Where the current grade of a grader does not count, an earlier revision does not
stand in.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, text

from service.batches import erasure, gates, outcomes, pauses
from service.batches.locks import hold_lineage
from service.errors import NotFound

_IMPOSE = text("""
INSERT INTO grader_quarantines AS q (policy_id, grader, since) VALUES (:policy, :grader, :since)
ON CONFLICT (policy_id, grader) WHERE lifted_at IS NULL
DO UPDATE SET since = CASE WHEN q.since IS NOT NULL AND excluded.since IS NOT NULL
                           THEN least(q.since, excluded.since) END
RETURNING since
""")

_LIFT = text("""
UPDATE grader_quarantines SET lifted_at = clock_timestamp()
WHERE policy_id = :policy AND grader = :grader AND lifted_at IS NULL RETURNING id
""")

_IN_FORCE = text("""
SELECT grader, since, created_at FROM grader_quarantines
WHERE policy_id = :policy AND lifted_at IS NULL ORDER BY grader
""")

_RESTING = text("""
SELECT DISTINCT r.id FROM grades g JOIN rollouts r ON r.id = g.rollout_id
WHERE r.policy_id = :policy AND r.state IN ('batched', 'trained') AND g.grader = :grader
  AND (g.id = ANY(r.reward_grades) OR EXISTS (
      SELECT FROM batch_turns t JOIN batch_members m USING (batch_id, rollout_id)
      WHERE t.rollout_id = r.id AND m.live AND t.advantage IS NOT NULL AND g.id = ANY(t.grade_ids)))
  AND (CAST(:since AS timestamptz) IS NULL OR coalesce(g.graded_at, g.received_at) >= :since)
ORDER BY r.id
""")

_UNCLAIMED = text("""
SELECT DISTINCT b.id, b.number FROM batch_members m JOIN batches b ON b.id = m.batch_id
WHERE m.rollout_id = ANY(:ids) AND m.live AND b.state = 'ready' AND b.claimed_token IS NULL ORDER BY b.id
""")


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What a quarantine led to."""

    since: datetime | None
    tainted_versions: list[int]
    dissolved_batches: list[int]


def impose(connection: Connection, policy_id: int, grader: str, since: datetime | None) -> Quarantined:
    """Stop counting a grader's grades, all or those since a time; a second call can only widen it."""
    hold_lineage(connection, policy_id)
    named = {"policy": policy_id, "grader": grader}
    in_force = connection.execute(_IMPOSE, {**named, "since": since}).scalar_one()
    resting = list(connection.execute(_RESTING, {**named, "since": in_force}).scalars())
    versions = erasure.trained_on(connection, resting)
    tainted = erasure.taint(connection, policy_id, versions, f"quarantined grader {grader}")
    batches = connection.execute(_UNCLAIMED, {"ids": resting}).all()
    for batch in batches:
        outcomes.dissolve(connection, batch.id, "grader_quarantined")
    _reconsider(connection, policy_id)
    return Quarantined(in_force, tainted, [batch.number for batch in batches])


def lift(connection: Connection, policy_id: int, grader: str) -> None:
    """Let a grader's grades count again. Raises NotFound when it is not in quarantine."""
    lifted = connection.execute(_LIFT, {"policy": policy_id, "grader": grader}).one_or_none()
    if lifted is None:
        raise NotFound(f"Grader {grader!r} is not in quarantine", code="not_quarantined")
    _reconsider(connection, policy_id)


def in_force(connection: Connection, policy_id: int) -> list[dict[str, Any]]:
    """Return the graders in quarantine, as the API shows them."""
    return [
        {
            "grader": row.grader,
            "since": None if row.since is None else row.since.isoformat(),
            "quarantined_at": row.created_at.isoformat(),
        }
        for row in connection.execute(_IN_FORCE, {"policy": policy_id})
    ]


def _reconsider(connection: Connection, policy_id: int) -> None:
    gates.open_epoch(connection, policy_id)
    pauses.look_afresh(connection, policy_id)  # rewards without this grader are not comparable
    gates.evaluate_policy(connection, policy_id)
