"""Which grades do not count because their grader is in quarantine, and which batches rest on them.

Must run inside the caller's transaction. Knows neither how a quarantine comes (quarantine.py) nor what
becomes of a batch (outcomes.py). Invariant: "in quarantine" is written here once, so that gates, turns,
claims and the step's commit cannot mean different things by it.
"""

from sqlalchemy import Connection, text


def in_quarantine(row: str) -> str:
    """Return the SQL condition that grade `g` does not count; `row` is one of its policy."""
    return f"""EXISTS (
        SELECT FROM grader_quarantines q
        WHERE q.policy_id = {row}.policy_id AND q.grader = g.grader AND q.lifted_at IS NULL
          AND (q.since IS NULL OR coalesce(g.graded_at, g.received_at) >= q.since))"""


RESTED_ON = f"""
SELECT g.grader
FROM batch_members m
JOIN rollouts r ON r.id = m.rollout_id
JOIN grades g ON g.rollout_id = r.id AND (g.id = ANY(r.reward_grades) OR EXISTS (
    SELECT FROM batch_turns t WHERE t.batch_id = m.batch_id AND t.rollout_id = r.id
      AND t.advantage IS NOT NULL AND g.id = ANY(t.grade_ids)))
WHERE m.batch_id = :batch AND m.live AND {in_quarantine("r")}
"""  # noqa: S608 - our own condition
"""Graders in quarantine now that made a reward of the batch, of a whole rollout or of a turn that teaches."""

_RESTS = text(f"SELECT EXISTS ({RESTED_ON})")


def rests_on_quarantined(connection: Connection, batch_id: int) -> bool:
    """Tell whether a batch was made of grades that do not count any more."""
    rests: bool = connection.execute(_RESTS, {"batch": batch_id}).scalar_one()
    return rests
