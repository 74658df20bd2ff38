"""Rewinding the trainer: the head goes to another version of the lineage, and work goes on from there.

    0 ─ 1 ─ 2 ─ 3 ─ 4 ─ 5        rewind to 3: head 3, 4 and 5 are off the branch
                └─ 6 ─ 7         the next step makes 6: a number is never used twice

Must run inside the caller's transaction. Invariants: the token is new, so that nothing that was being
trained can commit; a version is `rewound` iff it is neither the head nor one of its ancestors, so
that going back to an abandoned branch gives its rollouts back; ready batches are dissolved, claimed or
not; rollouts of rewound versions are `off_branch`. What was trained on the abandoned branch stays trained.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, text

from service.adapters import pointers
from service.batches import gates, outcomes, pauses
from service.batches.locks import hold_lineage

_BRANCH = text("""
WITH RECURSIVE branch AS (
    SELECT version, parent FROM policy_versions WHERE policy_id = :policy AND version = :version
    UNION ALL
    SELECT v.version, v.parent FROM policy_versions v JOIN branch b ON v.version = b.parent
    WHERE v.policy_id = :policy
)
UPDATE policy_versions v SET rewound = NOT v.rewound
WHERE v.policy_id = :policy AND v.rewound = EXISTS (SELECT FROM branch b WHERE b.version = v.version)
RETURNING v.version, v.rewound
""")

_POINT = text("""
UPDATE lineages l SET head_version = v.version, head_depth = v.depth, fencing_token = l.fencing_token + 1,
    -- somebody else's approval stands as long as what was approved is on the branch
    promoted_version = CASE WHEN serving.rewound
                              OR (coalesce(s.document #>> '{promotion,mode}', 'auto') = 'auto'
                                  AND NOT (:keep_hold AND l.promotion_held))
                            THEN v.version ELSE l.promoted_version END,
    promotion_held = :keep_hold AND l.promotion_held AND NOT serving.rewound,
    holder = NULL, expires_at = NULL, activity = 'idle'
FROM policy_versions v, policy_versions serving, policies p
JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
WHERE l.policy_id = :policy AND p.id = l.policy_id AND v.policy_id = l.policy_id AND v.version = :version
  AND serving.policy_id = l.policy_id AND serving.version = l.promoted_version
""")

_READY_BATCHES = text("""
SELECT id, number FROM batches WHERE policy_id = :policy AND state = 'ready' ORDER BY number
""")


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a rewind led to."""

    before: int
    head: int
    off_branch: list[int]
    """Versions that this rewind took off the branch."""
    back_on_branch: list[int]
    dissolved_batches: list[int]


def rewind(
    connection: Connection,
    policy_id: int,
    version: int,
    *,
    reason: str,
    force: bool = False,
    keep_hold: bool = False,
) -> Rewound:
    """Make a version the head under a new fencing token; `promoted` follows unless it stays on the branch.

    `keep_hold`: where somebody holds `promoted` at a version of the branch, it stays held there.
    Raises NotFound, Conflict (`version_gone`, `version_tainted` unless forced).
    """
    hold_lineage(connection, policy_id)
    before = pointers.hold(connection, policy_id).head_version
    found = pointers.find(connection, policy_id, version)
    pointers.refuse_without_files(found)
    pointers.refuse_tainted(found, force)
    pointers.say_why(connection, reason)
    named = {"policy": policy_id, "version": version}
    turned = connection.execute(_BRANCH, named).all()
    connection.execute(_POINT, {**named, "keep_hold": keep_hold})
    if any(not row.rewound for row in turned):
        pauses.look_afresh(connection, policy_id)  # whoever brings a branch back knows what guards said of it
    # The epoch first: members given back are evaluated at once, under what holds from now on.
    gates.open_epoch(connection, policy_id)
    batches = connection.execute(_READY_BATCHES, named).all()
    for batch in batches:
        outcomes.dissolve(connection, batch.id, "rewound")
    gates.evaluate_policy(connection, policy_id)
    return Rewound(
        before, version,
        sorted(row.version for row in turned if row.rewound),
        sorted(row.version for row in turned if not row.rewound),
        [batch.number for batch in batches],
    )  # fmt: skip
