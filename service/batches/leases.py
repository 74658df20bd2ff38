"""The policy lease: who may extend a lineage, and the fencing token that stops everybody else.

One row a policy (`lineages`) that claim, heartbeat, rewind and the step's commit all lock. A token is
never reused. All times are the database's. Weights and optimizer state that a worker keeps in memory
are valid only while its token is unchanged.
"""

from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, Engine, text

from service.database.engine import transaction
from service.errors import LeaseLost

Activity = Literal["idle", "loading", "training", "publishing"]

_WORK = text("""
SELECT b.policy_id FROM batches b
JOIN policies p ON p.id = b.policy_id AND NOT p.paused
JOIN lineages l ON l.policy_id = b.policy_id
WHERE b.state = 'ready' AND (l.expires_at IS NULL OR l.expires_at <= clock_timestamp() OR l.holder = :holder)
ORDER BY b.created_at, b.id LIMIT 1
""")

_CLAIM = text("""
UPDATE lineages SET holder = :holder, fencing_token = fencing_token + 1, activity = 'loading',
    heartbeat_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => :ttl)
WHERE policy_id = :policy AND (expires_at IS NULL OR expires_at <= clock_timestamp() OR holder = :holder)
RETURNING fencing_token
""")

_HEARTBEAT = text("""
UPDATE lineages SET activity = :activity, heartbeat_at = clock_timestamp(),
    expires_at = clock_timestamp() + make_interval(secs => :ttl)
WHERE policy_id = :policy AND fencing_token = :token
RETURNING fencing_token
""")

_RELEASE = text("""
UPDATE lineages SET expires_at = NULL, holder = NULL, activity = 'idle'
WHERE policy_id = :policy AND fencing_token = :token
""")

_HOLD = text("""
SELECT head_version, head_depth, next_version FROM lineages
WHERE policy_id = :policy AND fencing_token = :token FOR UPDATE
""")


@dataclass(frozen=True, slots=True)
class Lease:
    """Time-limited ownership of one policy's lineage."""

    policy_id: int
    holder: str
    token: int


@dataclass(frozen=True, slots=True)
class Head:
    """The lineage as the lease's holder sees it, locked until its transaction ends."""

    version: int
    depth: int
    next_version: int


def policy_with_work(engine: Engine, holder: str) -> int | None:
    """Return the policy whose ready batch is oldest and whose lease is free or mine; None: nothing to do."""
    with transaction(engine) as connection:
        found: int | None = connection.execute(_WORK, {"holder": holder}).scalar_one_or_none()
        return found


def claim(engine: Engine, policy_id: int, holder: str, ttl_seconds: float) -> Lease | None:
    """Take an absent, expired or own lease under a new token; None while somebody else holds it."""
    with transaction(engine) as connection:
        token = connection.execute(
            _CLAIM, {"policy": policy_id, "holder": holder, "ttl": ttl_seconds}
        ).scalar_one_or_none()
    return None if token is None else Lease(policy_id, holder, token)


def heartbeat(engine: Engine, lease: Lease, ttl_seconds: float, activity: Activity) -> None:
    """Prolong the lease. Raises LeaseLost when a newer token exists."""
    with transaction(engine) as connection:
        kept = connection.execute(
            _HEARTBEAT,
            {
                "policy": lease.policy_id,
                "token": lease.token,
                "ttl": ttl_seconds,
                "activity": activity,
            },
        ).scalar_one_or_none()
    if kept is None:
        raise LeaseLost(f"Token {lease.token} of policy {lease.policy_id} is no longer the newest")


def release(engine: Engine, lease: Lease) -> None:
    """Give the lease back at once; harmless when it is lost already."""
    with transaction(engine) as connection:
        connection.execute(_RELEASE, {"policy": lease.policy_id, "token": lease.token})


def hold(connection: Connection, lease: Lease) -> Head:
    """Lock the lineage for the caller's transaction and return its head. Raises LeaseLost.

    The token decides, not the clock: an expired lease that nobody took since is still mine, and
    while this row is locked nobody can take it.
    """
    row = connection.execute(_HOLD, {"policy": lease.policy_id, "token": lease.token}).one_or_none()
    if row is None:
        raise LeaseLost(f"Token {lease.token} of policy {lease.policy_id} is no longer the newest")
    return Head(row.head_version, row.head_depth, row.next_version)
