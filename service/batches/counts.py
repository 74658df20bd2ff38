"""Counts by gate, exact and cheap: kept by the database's triggers (migration 0003), folded here.

Must run inside the caller's transaction. Invariants: what is counted plus the changes not yet folded
in equals a recount of the rows, in every snapshot; no writer waits for another's count.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from service.batches.locks import COUNTS, try_lock

_READ = text("""
SELECT state, reason, depth, sum(amount)::bigint AS amount, max(last_at) AS last_at FROM (
    SELECT state, reason, depth, amount, last_at FROM gate_counts WHERE policy_id = :policy
    UNION ALL
    SELECT state, reason, depth, amount, last_at FROM gate_count_changes WHERE policy_id = :policy) AS every
GROUP BY state, reason, depth HAVING sum(amount) <> 0 OR state = 'grader' ORDER BY state, reason, depth
""")

_FOLD = text("""
WITH taken AS (
    DELETE FROM gate_count_changes RETURNING policy_id, state, reason, depth, amount, last_at
)
INSERT INTO gate_counts AS c (policy_id, state, reason, depth, amount, last_at)
SELECT policy_id, state, reason, depth, sum(amount), max(last_at) FROM taken GROUP BY 1, 2, 3, 4
ON CONFLICT (policy_id, state, reason, depth) DO UPDATE
SET amount = c.amount + excluded.amount, last_at = greatest(c.last_at, excluded.last_at)
""")

# Depths that have been trained, reasons that nobody has any more.
_TIDY = text("DELETE FROM gate_counts WHERE amount = 0 AND state <> 'grader'")

_ADD = text("""
INSERT INTO gate_count_changes (policy_id, state, reason, depth, amount)
VALUES (:policy, :state, '', -1, :amount)
""")


@dataclass(frozen=True, slots=True)
class Count:
    """Rollouts (or grades) in one state for one reason; `depth` only of ready ones."""

    state: str
    reason: str
    depth: int
    amount: int
    last_at: datetime | None


def read(connection: Connection, policy_id: int) -> list[Count]:
    """Return a policy's counts as of now, changes not yet folded in included."""
    return [Count(*row) for row in connection.execute(_READ, {"policy": policy_id})]


def fold(connection: Connection) -> None:
    """Fold the changes of all policies into their counts; no-op while another scheduler does."""
    if try_lock(connection, COUNTS, 0):
        connection.execute(_FOLD)
        connection.execute(_TIDY)


def add(connection: Connection, policy_id: int, state: str, amount: int) -> None:
    """Count something that leaves no row behind, like grades that were given up."""
    if amount:
        connection.execute(_ADD, {"policy": policy_id, "state": state, "amount": amount})
