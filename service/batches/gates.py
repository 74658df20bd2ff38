"""Gates: the policy's reward rule and the state of each rollout, in set-based SQL.

Must run inside the caller's transaction. Invariants: a rollout whose trace has come is in exactly one
state with its reason; no reward is invented (no counting grade -> null, never 0); batched and trained
rollouts are not touched (grades that come then are late).
Only grades named `overall` without a turn make the reward; others are kept for insight.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, text

_EVALUATE = text("""
WITH subject AS (
    SELECT r.id, r.reason, r.ready_at, p.settings_revision, s.document -> 'reward' AS rule
    FROM rollouts r
    JOIN policies p ON p.id = r.policy_id
    JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
    WHERE r.id = ANY(:ids) AND r.erased_at IS NULL
      AND (r.state IN ('waiting_reward', 'ready')
           -- an excluded rollout still gets its reward: it serves baselines as history
           OR (r.state = 'excluded' AND (r.reason LIKE 'untrainable:%' OR r.reason = 'failed_rollout')))
), counting AS (
    SELECT s.id, g.id AS grade_id, g.grader, g.value, g.received_at,
           coalesce(g.graded_at, g.received_at) AS at,
           CASE WHEN s.rule ->> 'rule' = 'weighted'
                THEN coalesce((s.rule -> 'weights' ->> g.grader)::float8, 0) ELSE 1 END AS weight
    FROM subject s
    JOIN grades g ON g.rollout_id = s.id
    WHERE g.current AND g.value IS NOT NULL AND g.turn IS NULL AND g.name = 'overall'
), spoken AS (
    -- sums are ordered by grader, so that the order of arrival cannot change a bit of the reward
    SELECT id,
           sum(value * weight ORDER BY grader) / nullif(sum(weight ORDER BY grader), 0) AS weighted,
           min(value) AS least,
           (array_agg(value ORDER BY at DESC, grade_id DESC))[1] AS latest,
           array_agg(grader) AS graders,
           array_agg(grade_id ORDER BY grade_id) AS grade_ids,
           min(received_at) AS first_at, max(received_at) AS last_at
    FROM counting GROUP BY id
), judged AS (
    SELECT s.id, s.reason, s.settings_revision, spoken.grade_ids,
           CASE s.rule ->> 'rule' WHEN 'min' THEN least WHEN 'latest' THEN latest ELSE weighted END AS reward,
           -- required graders that have not spoken, in the rule's order
           (SELECT string_agg(grader, ',') FROM jsonb_array_elements_text(s.rule -> 'require') AS grader
            WHERE grader <> ALL (coalesce(spoken.graders, '{}'))) AS missing,
           spoken.first_at + make_interval(secs => (s.rule ->> 'wait_seconds')::float8) AS waited_at,
           spoken.last_at + make_interval(secs => (s.rule ->> 'settle_seconds')::float8) AS settled_at
    FROM subject s LEFT JOIN spoken ON spoken.id = s.id
), gated AS (
    SELECT id, reason, settings_revision, grade_ids, reward,
           CASE WHEN grade_ids IS NULL THEN 'no_grade'
                WHEN missing IS NOT NULL THEN 'missing:' || missing
                WHEN reward IS NULL THEN 'missing:weighted'
                WHEN waited_at > clock_timestamp() THEN 'waiting_for_graders'
                WHEN settled_at > clock_timestamp() THEN 'settling' END AS obstacle,
           greatest(waited_at, settled_at) AS due_at
    FROM judged
)
UPDATE rollouts r SET
    state = CASE WHEN r.state = 'excluded' THEN 'excluded'
                 WHEN obstacle IS NULL THEN 'ready' ELSE 'waiting_reward' END,
    reason = CASE WHEN r.state = 'excluded' THEN r.reason ELSE coalesce(obstacle, '') END,
    due_at = CASE WHEN obstacle IN ('waiting_for_graders', 'settling') THEN g.due_at END,
    reward = CASE WHEN obstacle IS NULL THEN least(greatest(g.reward, 0), 1) END,
    reward_revision = CASE WHEN obstacle IS NULL THEN g.settings_revision END,
    reward_grades = CASE WHEN obstacle IS NULL THEN g.grade_ids END,
    rewarded_at = CASE WHEN obstacle IS NULL THEN clock_timestamp() END,
    ready_at = CASE WHEN obstacle IS NULL AND r.state <> 'excluded'
                    THEN coalesce(r.ready_at, clock_timestamp()) END
FROM gated g WHERE r.id = g.id
""")

_OPEN = text("""
SELECT id FROM rollouts WHERE policy_id = :policy AND state IN ('waiting_reward', 'ready')
ORDER BY id FOR UPDATE
""")

_DUE = text("""
SELECT id FROM rollouts WHERE due_at <= clock_timestamp() ORDER BY due_at LIMIT :limit FOR UPDATE SKIP LOCKED
""")


def takes_grades(state: str, reason: str) -> bool:
    """Tell whether a grade that comes now can still change this rollout's reward (see `subject` above)."""
    if state == "excluded":
        return reason.startswith("untrainable:") or reason == "failed_rollout"
    return state in ("waiting_reward", "ready")


def evaluate(connection: Connection, rollouts: Sequence[int]) -> None:
    """Recompute reward, state and reason of these rollouts; the caller holds their registry locks."""
    connection.execute(_EVALUATE, {"ids": list(rollouts)})


def evaluate_policy(connection: Connection, policy_id: int) -> None:
    """Recompute every open rollout of a policy, after a change of its rule."""
    open_ids = connection.execute(_OPEN, {"policy": policy_id}).scalars()
    evaluate(connection, list(open_ids))


def evaluate_due(connection: Connection, *, limit: int = 1000) -> int:
    """Evaluate rollouts whose waiting or settling has ended; return how many there were."""
    due = list(connection.execute(_DUE, {"limit": limit}).scalars())
    if due:
        evaluate(connection, sorted(due))
    return len(due)
