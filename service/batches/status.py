"""The answer to "why is nothing training?": counts by gate, the next batch, the trainer, the last step.

Reads only, and costs the same with a thousand rollouts as with a million: counts are maintained
(counts.py), ages are index probes. `blocked_by` comes from the very function that assembly asks.
"""

from collections import defaultdict
from typing import Any

from sqlalchemy import Connection, text

from service.batches import alerts
from service.batches.outlook import Outlook, outlook
from service.database.tables import ROLLOUT_STATES

# One round trip for all that is one row: a busy machine makes each of them wait.
_PRESENT = text("""
SELECT l.head_version, l.promoted_version, l.holder, l.activity, l.expires_at > clock_timestamp() AS held,
       extract(epoch FROM clock_timestamp() - l.heartbeat_at)::float8 AS heartbeat_age,
       b.number AS batch, b.claimed_token IS NOT NULL AS claimed, coalesce(b.diagnosis, '') AS diagnosis,
       (SELECT estimator FROM batches e WHERE e.policy_id = l.policy_id ORDER BY e.number DESC LIMIT 1)
           AS estimator,
       extract(epoch FROM clock_timestamp() - (
           SELECT received_at FROM rollouts r WHERE r.policy_id = l.policy_id AND r.state = 'waiting_reward'
           ORDER BY received_at, id LIMIT 1))::float8 AS oldest_waiting_reward,
       extract(epoch FROM clock_timestamp() - (
           SELECT seen_at FROM rollouts r WHERE r.policy_id = l.policy_id AND r.state IS NULL
           ORDER BY seen_at LIMIT 1))::float8 AS oldest_waiting_for_trace
FROM lineages l
LEFT JOIN LATERAL (
    SELECT number, claimed_token, diagnosis FROM batches
    WHERE policy_id = l.policy_id AND state = 'ready' ORDER BY number LIMIT 1) AS b ON true
WHERE l.policy_id = :policy
""")

_LAST = text("""
SELECT b.number, b.outcome, b.metrics, b.ended_at, v.version FROM batches b
LEFT JOIN policy_versions v ON v.batch_id = b.id
WHERE b.policy_id = :policy AND b.state IN ('trained', 'no_step') ORDER BY b.number DESC LIMIT 1
""")

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
    view = outlook(connection, policy_id)
    present = connection.execute(_PRESENT, {"policy": policy_id}).one()
    rollouts, reasons = gate_counts(view)
    found = alerts.find(connection, view)
    return {
        "policy": view.policy,
        "paused": view.paused,
        "paused_by": view.paused_code or None,
        "paused_reason": view.paused_reason,
        "settings_revision": view.revision,
        "head_version": present.head_version,
        "promoted_version": present.promoted_version,
        "trainer": _trainer(present),
        "rollouts": rollouts,
        "reasons": reasons,
        **_grades(view),
        "oldest_waiting_reward_age_s": present.oldest_waiting_reward,
        "oldest_grade_waiting_for_trace_age_s": present.oldest_waiting_for_trace,
        "next_batch": {
            "size": view.settings.batching.size,
            "ready_tasks": len(view.candidates),
            "blocked_by": view.blocked_by,
            "oldest_ready_age_s": view.oldest_ready_age_seconds,
        },
        "baseline": {
            "in_use": present.estimator,
            "b_eff_ratio": b_eff_ratio(connection, policy_id),
        },
        "last_step": _last_step(connection, policy_id),
        "alerts": [{"code": alert.code, "detail": alert.detail} for alert in found],
    }


def b_eff_ratio(connection: Connection, policy_id: int, batches: int = B_EFF_BATCHES) -> float | None:
    """Return B_eff of the baselines used over B_eff of the batch mean, over the last batches."""
    found = connection.execute(_B_EFF, {"policy": policy_id, "batches": batches}).scalar_one()
    return None if found is None else float(found)


def gate_counts(view: Outlook) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Return rollouts by state, and by reason within it; ready ones that are too old count as stale."""
    rollouts = dict.fromkeys(ROLLOUT_STATES, 0)
    reasons: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for count in view.counted:
        stale = count.state == "ready" and count.depth < view.least_depth
        state, reason = ("excluded", "stale") if stale else (count.state, count.reason)
        if state in rollouts:
            rollouts[state] += count.amount
            if reason:
                reasons[state][reason] += count.amount
    return rollouts, {state: dict(of) for state, of in reasons.items()}


def _grades(view: Outlook) -> dict[str, Any]:
    amounts = {count.state: count.amount for count in view.counted}
    return {
        "grades_waiting_for_trace": amounts.get("waiting_for_trace", 0),
        "grades_expired_without_trace": amounts.get("expired_grades", 0),
        "late_grades": amounts.get("late_grades", 0),
        "graders": [
            {
                "grader": count.reason,
                "grades": count.amount,
                "last_grade_age_s": None
                if count.last_at is None
                else (view.now - count.last_at).total_seconds(),
            }
            for count in view.counted
            if count.state == "grader"
        ],
    }


def _trainer(present: Any) -> dict[str, Any]:
    return {
        "state": present.activity if present.held else "absent",
        "batch": present.batch if present.claimed else None,
        "lease_holder": present.holder if present.held else None,
        "heartbeat_age_s": present.heartbeat_age,
        "diagnosis": present.diagnosis,
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
