"""Giving up what waited too long: rollouts without a reward, grades without a trace.

Must run inside the caller's transaction. Any number may run at once: rows that somebody holds are
left for the next time.
"""

from sqlalchemy import Connection, text

from service.batches import counts
from service.eligibility import Reward

BATCH = 1000

_EXPIRE = text("""
WITH old AS (
    SELECT id FROM rollouts
    WHERE policy_id = :policy AND state = 'waiting_reward'
      AND received_at <= clock_timestamp() - make_interval(secs => :seconds)
    ORDER BY received_at LIMIT :limit FOR UPDATE SKIP LOCKED
)
UPDATE rollouts r SET state = 'excluded', reason = 'expired', due_at = NULL,
    -- noted, so that a rule that waits longer finds it again
    gate_epoch = (SELECT gate_epoch FROM policies WHERE id = :policy)
FROM old WHERE r.id = old.id
""")

_ABANDONED = text("""
SELECT id FROM rollouts
WHERE policy_id = :policy AND state IS NULL
  AND seen_at <= clock_timestamp() - make_interval(secs => :seconds)
ORDER BY seen_at LIMIT :limit FOR UPDATE SKIP LOCKED
""")

_FORGET_GRADES = text("DELETE FROM grades WHERE rollout_id = ANY(:ids) RETURNING current")
_FORGET = text("DELETE FROM rollouts WHERE id = ANY(:ids)")


def expire(connection: Connection, policy_id: int, rule: Reward) -> None:
    """Exclude what waited longer than the rule allows, and remove grades whose trace never came."""
    if rule.expire_seconds is not None:
        connection.execute(_EXPIRE, {"policy": policy_id, "seconds": rule.expire_seconds, "limit": BATCH})
    if rule.grade_expire_seconds is not None:
        _expire_grades(connection, policy_id, rule.grade_expire_seconds)


def _expire_grades(connection: Connection, policy_id: int, seconds: float) -> None:
    ids = list(
        connection.execute(_ABANDONED, {"policy": policy_id, "seconds": seconds, "limit": BATCH}).scalars()
    )
    if not ids:
        return
    gone = list(connection.execute(_FORGET_GRADES, {"ids": ids}).scalars())
    connection.execute(_FORGET, {"ids": ids})
    counts.add(connection, policy_id, "expired_grades", sum(gone))
