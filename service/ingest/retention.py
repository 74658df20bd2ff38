"""Retention: remove raw documents that are older than their policy keeps them, a bounded batch at a time.

Knows what a policy says and when a document came, nothing of what it holds. Invariants: one short
transaction a batch, so that neither memory nor locks grow with history; the normalised document, the
registry row and the fingerprint stay, so that duplicates are still recognised.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Engine, text

from service.database.engine import transaction

BATCH_ROWS = 500

_POLICIES = text("""
SELECT p.id, p.name, (s.document -> 'retention' ->> 'raw_days')::float8 AS raw_days
FROM policies p JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
WHERE s.document -> 'retention' ->> 'raw_days' IS NOT NULL ORDER BY p.id
""")

_REMOVE = text("""
WITH old AS (
    SELECT rollout_id FROM rollout_documents
    WHERE policy_id = :policy AND raw IS NOT NULL
      AND received_at < clock_timestamp() - make_interval(secs => :days * 86400)
    ORDER BY received_at LIMIT :rows
    -- two runs at once share the work
    FOR UPDATE SKIP LOCKED
)
UPDATE rollout_documents d SET raw = NULL FROM old WHERE d.rollout_id = old.rollout_id
""")

_FORGET_USAGE = text("DELETE FROM policy_usage WHERE day < (clock_timestamp() AT TIME ZONE 'UTC')::date - 31")


@dataclass(frozen=True, slots=True)
class Removed:
    """One batch: how many documents of which policy lost their raw text."""

    policy: str
    documents: int


def remove_expired(engine: Engine, *, batch_rows: int = BATCH_ROWS) -> Iterator[Removed]:
    """Remove what has expired, batch by batch; each has been committed when it is yielded."""
    with transaction(engine) as connection:
        connection.execute(_FORGET_USAGE)
        policies = connection.execute(_POLICIES).all()
    for policy in policies:
        while removed := _remove(engine, policy.id, policy.raw_days, batch_rows):
            yield Removed(policy.name, removed)


def _remove(engine: Engine, policy_id: int, days: float, rows: int) -> int:
    with transaction(engine) as connection:
        done = connection.execute(_REMOVE, {"policy": policy_id, "days": days, "rows": rows})
        return int(done.rowcount)
