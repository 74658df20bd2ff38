"""What may be removed from the store: folders that are nobody's, and files that nobody needs any more.

Invariants (design/lifecycle.md): an orphan goes only if it has no version row *and* carries a token below
the policy's, rows and token read in one statement, so that no commit can still claim it; never
removed are the files of head, promoted and pinned versions, of ancestors that a rewind may need, and of
versions that an open rollout was sampled from. A version's row stays, its number is never used again; the
row says so before the files go, so that no pointer can come to it in between.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text

from service.adapters import pointers
from service.adapters.store import AdapterStore
from service.database.engine import transaction

_FOLDER = re.compile(r".*/v\d+-(\d+)-\d+")

_POLICIES = text("SELECT id, name FROM policies ORDER BY id")

# One statement: whoever has this token or a newer one may still commit a folder that has no row yet.
_CLAIMED = text("""
SELECT l.fencing_token,
       ARRAY(SELECT folder FROM policy_versions v
             WHERE v.policy_id = l.policy_id AND folder IS NOT NULL AND files_removed_at IS NULL) AS needed,
       ARRAY(SELECT folder FROM policy_versions v
             WHERE v.policy_id = l.policy_id AND files_removed_at IS NOT NULL) AS given_up
FROM lineages l WHERE l.policy_id = :policy
""")

_EXPENDABLE = text("""
WITH RECURSIVE ancestors AS (
    SELECT v.version, v.parent, 0 AS steps FROM policy_versions v
    JOIN lineages l ON l.policy_id = v.policy_id AND v.version = l.head_version WHERE l.policy_id = :policy
    UNION ALL
    SELECT v.version, v.parent, a.steps + 1 FROM policy_versions v JOIN ancestors a ON v.version = a.parent
    WHERE v.policy_id = :policy AND a.steps < :rewindable
)
SELECT v.version, v.folder FROM policy_versions v
JOIN lineages l ON l.policy_id = v.policy_id
JOIN policies p ON p.id = v.policy_id
JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
WHERE v.policy_id = :policy AND v.version > 0 AND v.files_removed_at IS NULL AND NOT v.pinned
  AND v.version NOT IN (l.head_version, l.promoted_version)
  AND v.version NOT IN (SELECT version FROM ancestors)
  AND v.created_at < clock_timestamp() - make_interval(secs => :younger)
  -- the newest ones
  AND v.version < (SELECT min(version) FROM (
      SELECT version FROM policy_versions n WHERE n.policy_id = :policy
      ORDER BY version DESC LIMIT :keep) AS newest)
  -- a rollout's later calls may come from any version young enough to be trained
  AND v.depth < l.head_depth - coalesce((s.document #>> '{batching,max_staleness}')::int, 8)
  AND NOT EXISTS (SELECT FROM rollouts r WHERE r.policy_id = v.policy_id AND r.version = v.version
                  AND r.state IN ('waiting_reward', 'ready', 'batched'))
ORDER BY v.version
""")

_GIVE_UP = text("""
UPDATE policy_versions SET files_removed_at = clock_timestamp()
WHERE policy_id = :policy AND version = ANY(:versions)
""")


@dataclass(frozen=True, slots=True)
class Rule:
    """What is kept of each policy, beside what must be."""

    keep: int = 50
    """Newest versions, whatever their branch."""
    rewindable: int = 20
    """Ancestors of the head."""
    younger_seconds: float = 86_400.0
    """Servers read adapters lazily, and pulls take a while."""


def collect(engine: Engine, store: AdapterStore, rule: Rule, *, dry_run: bool = False) -> Iterator[str]:
    """Remove what may go, of every policy; yield the folders. Repeating it finishes what was interrupted."""
    with transaction(engine) as connection:
        policies = connection.execute(_POLICIES).all()
    for policy in policies:
        if not dry_run:
            give_up(engine, policy.id, rule)
        with transaction(engine) as connection:
            doomed = expendable(connection, policy.id, rule) if dry_run else {}
            gone = orphans(connection, store, policy.id, policy.name)
        for folder in sorted({*doomed.values(), *gone}):
            if not dry_run:
                store.delete(folder)
            yield folder


def give_up(engine: Engine, policy_id: int, rule: Rule) -> list[int]:
    """Mark versions whose files are no longer kept; what lies in their folders is nobody's from here on."""
    with transaction(engine) as connection:
        pointers.hold(connection, policy_id)
        versions = sorted(expendable(connection, policy_id, rule))
        if versions:
            connection.execute(_GIVE_UP, {"policy": policy_id, "versions": versions})
        return versions


def expendable(connection: Connection, policy_id: int, rule: Rule) -> dict[int, str]:
    """Return the folders, by version, that the rule no longer keeps."""
    rows = connection.execute(
        _EXPENDABLE,
        {
            "policy": policy_id, "keep": rule.keep, "rewindable": rule.rewindable,
            "younger": rule.younger_seconds,
        },
    )  # fmt: skip
    return {row.version: row.folder for row in rows}


def orphans(connection: Connection, store: AdapterStore, policy_id: int, policy: str) -> list[str]:
    """Return folders in the store without a version that needs them, and that no trainer can still commit."""
    claimed = connection.execute(_CLAIMED, {"policy": policy_id}).one()
    needed, given_up = set(claimed.needed), set(claimed.given_up)
    return [
        folder
        for folder in store.folders(policy)
        if folder in given_up or (folder not in needed and _is_below(folder, claimed.fencing_token))
    ]


def _is_below(folder: str, token: int) -> bool:
    found = _FOLDER.fullmatch(folder)
    return found is not None and int(found.group(1)) < token
