"""Pausing a policy for a stated reason, and raising what a person should hear of at once.

Must run inside the caller's transaction; the trainer uses it too. Invariants: whoever paused first is
not overwritten; an alert is raised once until it is cleared (alerts.py).
"""

from collections.abc import Sequence

from sqlalchemy import Connection, text

_PAUSE = text("""
UPDATE policies p SET paused = true, paused_code = :code, paused_reason = :reason,
    guards_from_batch = CASE WHEN :seen THEN l.next_batch ELSE p.guards_from_batch END
FROM lineages l WHERE p.id = :policy AND l.policy_id = p.id AND NOT p.paused
""")

_LOOK_AFRESH = text("""
UPDATE policies p SET guards_from_batch = l.next_batch FROM lineages l
WHERE p.id = :policy AND l.policy_id = p.id
""")

_RAISE = text("""
INSERT INTO alerts (policy_id, code, detail)
SELECT :policy, code, detail
FROM unnest(CAST(:codes AS text[]), CAST(:details AS text[])) AS new (code, detail)
ON CONFLICT (policy_id, code) WHERE cleared_at IS NULL DO NOTHING
""")

LONGEST_REASON = 2000


def pause(connection: Connection, policy_id: int, code: str, reason: str, *, seen: bool = True) -> None:
    """Pause a policy unless somebody has, and raise the alert that says why.

    `seen`: the batches up to now are reported hereby; guards do not count them once somebody resumes.
    """
    reason = reason[:LONGEST_REASON]
    connection.execute(_PAUSE, {"policy": policy_id, "code": code, "reason": reason, "seen": seen})
    raise_alerts(connection, policy_id, [code], [reason])


def look_afresh(connection: Connection, policy_id: int) -> None:
    """Let guards look at later batches only: what came before is known, or not comparable."""
    connection.execute(_LOOK_AFRESH, {"policy": policy_id})


def raise_alerts(
    connection: Connection, policy_id: int, codes: Sequence[str], details: Sequence[str]
) -> None:
    """Raise alerts; those that are raised already stay as they are."""
    named = {"policy": policy_id, "codes": list(codes), "details": list(details)}
    connection.execute(_RAISE, named)
