"""The answer to "why is nothing training?": counts by gate, the next batch, the trainer, the last step.

Reads only; every number is counted from the rows that decide, and `blocked_by` comes from the very
function that assembly asks.
"""

from collections import defaultdict
from typing import Any

from sqlalchemy import Connection, text

from service.batches import assembly
from service.database.tables import ROLLOUT_STATES

# Staleness is derived from the head's depth here, as assembly does; no row says it.
_COUNTS = text("""
SELECT CASE WHEN r.state = 'ready' AND r.depth < l.head_depth - :staleness THEN 'excluded'
            ELSE r.state END AS state,
       CASE WHEN r.state = 'ready' AND r.depth < l.head_depth - :staleness THEN 'stale'
            WHEN r.state = 'batched' OR (r.state = 'trained' AND r.reason LIKE 'version %') THEN ''
            ELSE r.reason END AS reason,
       count(*) AS rollouts
FROM rollouts r JOIN lineages l ON l.policy_id = r.policy_id
WHERE r.policy_id = :policy AND r.state IS NOT NULL
GROUP BY 1, 2
""")

_ORPHANS = text("""
SELECT count(*) FROM grades g JOIN rollouts r ON r.id = g.rollout_id
WHERE r.policy_id = :policy AND r.state IS NULL AND g.current
""")

_LINEAGE = text("""
SELECT head_version, head_depth, promoted_version, holder, activity,
       expires_at > clock_timestamp() AS held,
       extract(epoch FROM clock_timestamp() - heartbeat_at)::float8 AS heartbeat_age
FROM lineages WHERE policy_id = :policy
""")

_READY_BATCH = text("""
SELECT number, claimed_token IS NOT NULL AS claimed, diagnosis FROM batches
WHERE policy_id = :policy AND state = 'ready' ORDER BY number LIMIT 1
""")

_LAST = text("""
SELECT b.number, b.outcome, b.metrics, b.ended_at, v.version FROM batches b
LEFT JOIN policy_versions v ON v.batch_id = b.id
WHERE b.policy_id = :policy AND b.state IN ('trained', 'no_step') ORDER BY b.ended_at DESC LIMIT 1
""")

_LAST_ESTIMATOR = text("SELECT estimator FROM batches WHERE policy_id = :policy ORDER BY number DESC LIMIT 1")

# B_eff(b) / B_eff(leave-one-out mean) = sum (r - m)^2 / sum (r - b)^2, over the last trained batches;
# m_i = (sum r - r_i) / (n - 1) within the batch (design/baselines.md, Setting).
_B_EFF = text("""
SELECT sum(power((r - mean) * n / (n - 1), 2)) / nullif(sum(power(advantage, 2)), 0)
FROM (SELECT m.reward AS r, m.advantage, avg(m.reward) OVER batch AS mean, count(*) OVER batch AS n
      FROM batch_members m JOIN (
          SELECT id FROM batches WHERE policy_id = :policy AND state IN ('trained', 'ready')
          ORDER BY number DESC LIMIT :batches) AS last ON last.id = m.batch_id
      WINDOW batch AS (PARTITION BY m.batch_id)) AS members WHERE n > 1
""")

B_EFF_BATCHES = 32


def policy_status(connection: Connection, policy_id: int) -> dict[str, Any]:
    """Return the status document of design/api.md."""
    view = assembly.outlook(connection, policy_id)
    lineage = connection.execute(_LINEAGE, {"policy": policy_id}).one()
    batch = connection.execute(_READY_BATCH, {"policy": policy_id}).one_or_none()
    rollouts, reasons = _counts(connection, policy_id, view.settings.batching.max_staleness)
    return {
        "policy": view.policy,
        "paused": view.paused,
        "settings_revision": view.revision,
        "head_version": lineage.head_version,
        "promoted_version": lineage.promoted_version,
        "trainer": _trainer(lineage, batch),
        "rollouts": rollouts,
        "reasons": reasons,
        "grades_waiting_for_trace": connection.execute(_ORPHANS, {"policy": policy_id}).scalar_one(),
        "next_batch": {
            "size": view.settings.batching.size,
            "ready_tasks": len(view.candidates),
            "blocked_by": view.blocked_by,
            "oldest_ready_age_s": view.oldest_ready_age_seconds,
        },
        "baseline": {
            "in_use": connection.execute(_LAST_ESTIMATOR, {"policy": policy_id}).scalar_one_or_none(),
            "b_eff_ratio": b_eff_ratio(connection, policy_id),
        },
        "last_step": _last_step(connection, policy_id),
    }


def b_eff_ratio(connection: Connection, policy_id: int, batches: int = B_EFF_BATCHES) -> float | None:
    """Return B_eff of the baselines used over B_eff of the batch mean, over the last batches."""
    found = connection.execute(_B_EFF, {"policy": policy_id, "batches": batches}).scalar_one()
    return None if found is None else float(found)


def _counts(
    connection: Connection, policy_id: int, staleness: int
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    rollouts = dict.fromkeys(ROLLOUT_STATES, 0)
    reasons: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for row in connection.execute(_COUNTS, {"policy": policy_id, "staleness": staleness}):
        rollouts[row.state] += row.rollouts
        if row.reason:
            reasons[row.state][row.reason] = row.rollouts
    return rollouts, dict(reasons)


def _trainer(lineage: Any, batch: Any) -> dict[str, Any]:
    return {
        "state": lineage.activity if lineage.held else "absent",
        "batch": batch.number if batch is not None and batch.claimed else None,
        "lease_holder": lineage.holder if lineage.held else None,
        "heartbeat_age_s": lineage.heartbeat_age,
        "diagnosis": batch.diagnosis if batch is not None else "",
    }


def _last_step(connection: Connection, policy_id: int) -> dict[str, Any] | None:
    row = connection.execute(_LAST, {"policy": policy_id}).one_or_none()
    if row is None:
        return None
    return {
        "batch": row.number,
        "version": row.version,
        "outcome": row.outcome or "trained",
        "ended_at": row.ended_at.isoformat(),
        **(row.metrics or {}),
    }
