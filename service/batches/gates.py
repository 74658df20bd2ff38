"""Gates: the policy's reward rule and the state of each rollout, in set-based SQL.

    waiting_reward <──> ready ──> batched (assembly.py) ──> trained | excluded (outcomes.py)
          │               │
          └── excluded ───┘   failed_rollout, off_branch (here), expired, not_sampled (their modules)

Must run inside the caller's transaction. Invariants: a rollout whose trace has come is in exactly one
state with its reason; no reward is invented (no counting grade -> null, never 0); batched and trained
rollouts are not touched (grades that come then are late). Only grades named `overall` without a turn
make the reward; others are kept for insight, and turns.py reads those of turns. Each evaluation notes
the policy's *gate epoch*: whatever changes what counts (rule, quarantine, rewind) raises it, and what
was evaluated before, by a writer that raced with the change too, is found by its older epoch and
evaluated again.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, text

from service.batches.trust import in_quarantine

FINAL = ("no_signal", "all_gated_out", "none_trainable", "poison", "erased")
"""Reasons of excluded rollouts that no grade and no rule changes."""
SWEEP = 2000
"""Rollouts evaluated in one transaction after a change."""

# An excluded rollout gets its reward too: it serves baselines as history.
_EVALUATE = text(
    """
WITH subject AS (
    SELECT r.id, r.policy_id, r.state, r.reason, r.received_at, r.gate_epoch AS epoch_before,
           p.settings_revision, p.gate_epoch, s.document -> 'reward' AS rule,
           coalesce(s.document -> 'statuses' ->> r.status, 'train') AS handling,
           coalesce(v.rewound, false) AS rewound,
           (s.document #>> '{reward,value_range,0}')::float8 AS low,
           (s.document #>> '{reward,value_range,1}')::float8 AS high,
           -- criteria matter only if the rule weighs them: most rules do not, and pay nothing
           nullif(s.document #> '{reward,criteria}', '{}') AS criteria
    FROM rollouts r
    JOIN policies p ON p.id = r.policy_id
    JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
    LEFT JOIN policy_versions v ON v.policy_id = r.policy_id AND v.version = r.version
    WHERE r.id = ANY(:ids) AND r.erased_at IS NULL
      AND (r.state IN ('waiting_reward', 'ready') OR (r.state = 'excluded' AND r.reason <> ALL(:final)))
), counting AS (
    SELECT s.id, g.id AS grade_id, g.grader, g.received_at, coalesce(g.graded_at, g.received_at) AS at,
           coalesce(stated.value, g.value) AS value,
           CASE WHEN s.rule ->> 'rule' = 'weighted'
                THEN coalesce((s.rule -> 'weights' ->> g.grader)::float8, 0) ELSE 1 END AS weight
    FROM subject s
    JOIN grades g ON g.rollout_id = s.id
    LEFT JOIN LATERAL (
        -- the weighted mean of the criteria, if the grade states every one as a number in the range;
        -- text is cast only where it surely is a number, and JSON read only where Postgres can
        SELECT CASE WHEN bool_and(number BETWEEN s.low AND s.high)
                    THEN (sum(weight * number ORDER BY name) / sum(weight ORDER BY name) - s.low)
                         / (s.high - s.low) END AS value
        FROM (
            SELECT w.key AS name, w.value::float8 AS weight,
                   CASE WHEN given ~ '^-?[0-9]{1,15}([.][0-9]{1,40})?([eE][-+]?[0-9]{1,2})?$'
                        THEN given::float8 ELSE 'NaN'::float8 END AS number
            FROM jsonb_each_text(s.criteria) AS w
            CROSS JOIN LATERAL (
                SELECT coalesce(CASE WHEN json_typeof(said -> w.key) = 'number' THEN said ->> w.key END, '')
                       AS given
                FROM (SELECT CASE WHEN position('\\x5c7530303030'::bytea IN g.criteria) = 0
                                  THEN convert_from(g.criteria, 'UTF8')::json END AS said) AS document
            ) AS criterion
            WHERE w.value::float8 > 0
        ) AS weighed
    ) AS stated ON s.criteria IS NOT NULL AND g.criteria IS NOT NULL
    WHERE g.current AND g.value IS NOT NULL AND g.turn IS NULL AND g.name = 'overall'
      AND NOT {in_quarantine}
), spoken AS (
    -- sums are ordered by grader, so that the order of arrival cannot change a bit of the reward
    SELECT id,
           sum(value * weight ORDER BY grader) / nullif(sum(weight ORDER BY grader), 0) AS weighted,
           min(value) AS least,
           (array_agg(value ORDER BY at DESC, grader))[1] AS latest,
           array_agg(grader) AS graders,
           array_agg(grade_id ORDER BY grade_id) FILTER (WHERE weight > 0) AS grade_ids,
           min(received_at) AS first_at, max(received_at) AS last_at
    FROM counting GROUP BY id
), judged AS (
    SELECT s.*, spoken.grade_ids, spoken.id IS NOT NULL AS graded,
           CASE s.rule ->> 'rule' WHEN 'min' THEN least WHEN 'latest' THEN latest ELSE weighted END AS reward,
           -- required graders that have not spoken, in the rule's order
           (SELECT string_agg(grader, ',') FROM jsonb_array_elements_text(s.rule -> 'require') AS grader
            WHERE grader <> ALL (coalesce(spoken.graders, '{}'))) AS missing,
           spoken.first_at + make_interval(secs => (s.rule ->> 'wait_seconds')::float8) AS waited_at,
           spoken.last_at + make_interval(secs => (s.rule ->> 'settle_seconds')::float8) AS settled_at,
           s.received_at + make_interval(secs => (s.rule ->> 'expire_seconds')::float8) AS expires_at
    FROM subject s LEFT JOIN spoken ON spoken.id = s.id
), gated AS (
    SELECT *,
           CASE WHEN NOT graded THEN 'no_grade'
                WHEN missing IS NOT NULL THEN 'missing:' || missing
                WHEN reward IS NULL THEN 'missing:weighted'
                WHEN waited_at > clock_timestamp() THEN 'waiting_for_graders'
                WHEN settled_at > clock_timestamp() THEN 'settling' END AS obstacle,
           -- what keeps it out whatever its grades; the last two until a change widens the limit
           CASE WHEN reason LIKE 'untrainable:%' AND state = 'excluded' THEN reason
                WHEN handling = 'exclude' THEN 'failed_rollout'
                WHEN rewound THEN 'off_branch'
                WHEN state = 'excluded' AND reason = 'over_limit' THEN reason
                WHEN state = 'excluded' AND reason = 'expired' AND expires_at <= clock_timestamp() THEN reason
                WHEN state = 'excluded' AND reason = 'not_sampled' AND epoch_before = gate_epoch THEN reason
                END AS exclusion
    FROM judged
), decided AS (
    SELECT id, gate_epoch, settings_revision,
           CASE WHEN exclusion IS NOT NULL THEN 'excluded' WHEN obstacle IS NULL THEN 'ready'
                ELSE 'waiting_reward' END AS state,
           coalesce(exclusion, obstacle, '') AS reason,
           CASE obstacle WHEN 'waiting_for_graders' THEN waited_at WHEN 'settling' THEN settled_at
                END AS due_at,
           CASE WHEN obstacle IS NULL THEN least(greatest(reward, 0), 1) END AS reward,
           CASE WHEN obstacle IS NULL THEN grade_ids END AS grade_ids
    FROM gated
)
UPDATE rollouts r SET
    state = d.state, reason = d.reason, due_at = d.due_at, gate_epoch = d.gate_epoch,
    reward = d.reward, reward_grades = d.grade_ids,
    reward_revision = CASE WHEN d.reward IS NOT NULL THEN d.settings_revision END,
    -- an evaluation that changes nothing does not move the rollout in the baselines' history
    rewarded_at = CASE WHEN d.reward IS NULL THEN NULL
                       WHEN d.reward = r.reward AND d.grade_ids = r.reward_grades THEN r.rewarded_at
                       ELSE clock_timestamp() END,
    ready_at = CASE WHEN d.state = 'ready' THEN coalesce(r.ready_at, clock_timestamp()) END
FROM decided d
WHERE r.id = d.id
  AND (r.state, r.reason, r.due_at, r.gate_epoch, r.reward, r.reward_grades)
      IS DISTINCT FROM (d.state, d.reason, d.due_at, d.gate_epoch, d.reward, d.grade_ids)
""".replace("{in_quarantine}", in_quarantine("s"))
)

_DUE = text("""
SELECT id FROM rollouts WHERE due_at <= clock_timestamp() ORDER BY due_at LIMIT :limit FOR UPDATE SKIP LOCKED
""")

# The order is that of the index: the first row tells whether there is any.
_TAKE_OUTDATED = text("""
SELECT id, state, reason FROM rollouts
WHERE policy_id = :policy AND gate_epoch IS NOT NULL AND state IN ('waiting_reward', 'ready', 'excluded')
  AND gate_epoch < (SELECT gate_epoch FROM policies WHERE id = :policy)
ORDER BY policy_id, gate_epoch LIMIT :limit FOR UPDATE SKIP LOCKED
""")
_IS_OUTDATED = text("""
SELECT coalesce((
    SELECT gate_epoch FROM rollouts
    WHERE policy_id = :policy AND gate_epoch IS NOT NULL AND state IN ('waiting_reward', 'ready', 'excluded')
    ORDER BY policy_id, gate_epoch LIMIT 1) < gate_epoch, false)
FROM policies WHERE id = :policy
""")

# What no rule can change needs no second look.
_SETTLE = text("UPDATE rollouts SET gate_epoch = NULL WHERE id = ANY(:ids)")

_OPEN_EPOCH = text("UPDATE policies SET gate_epoch = gate_epoch + 1 WHERE id = :policy")


def takes_grades(state: str, reason: str) -> bool:
    """Tell whether a grade that comes now can still change this rollout's reward (see `subject` above)."""
    if state == "excluded":
        return reason not in FINAL and reason != "expired"
    return state in ("waiting_reward", "ready")


def evaluate(connection: Connection, rollouts: Sequence[int]) -> None:
    """Recompute reward, state and reason of these rollouts; the caller holds their registry locks."""
    connection.execute(_EVALUATE, {"ids": list(rollouts), "final": list(FINAL)})


def open_epoch(connection: Connection, policy_id: int) -> None:
    """Make every evaluation so far outdated: something has changed what counts."""
    connection.execute(_OPEN_EPOCH, {"policy": policy_id})


def evaluate_policy(connection: Connection, policy_id: int, *, limit: int = SWEEP) -> int:
    """Evaluate rollouts again that were evaluated before the newest change; return how many there were.

    Rows that somebody holds are left for the next time. Batched and trained ones are not touched.
    """
    if not is_outdated(connection, policy_id):
        return 0
    rows = connection.execute(_TAKE_OUTDATED, {"policy": policy_id, "limit": limit}).all()
    final = [row.id for row in rows if row.state == "excluded" and row.reason in FINAL]
    if final:
        connection.execute(_SETTLE, {"ids": final})
    if rows:
        evaluate(connection, sorted(row.id for row in rows))
    return len(rows)


def is_outdated(connection: Connection, policy_id: int) -> bool:
    """Tell whether some open rollout was evaluated before the newest change: no batch until it is."""
    found: bool = connection.execute(_IS_OUTDATED, {"policy": policy_id}).scalar_one()
    return found


def evaluate_due(connection: Connection, *, limit: int = 1000) -> int:
    """Evaluate rollouts whose waiting or settling has ended; return how many there were."""
    due = list(connection.execute(_DUE, {"limit": limit}).scalars())
    if due:
        evaluate(connection, sorted(due))
    return len(due)
