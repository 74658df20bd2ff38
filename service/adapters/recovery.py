"""After a restore: the database may be older than the store, and than what was pulled from it.

Must run while no trainer does. Invariants: a number that the store has seen is never used again, though
the restored database does not know it; nobody who trained before the restore can commit; versions whose
files did not come back take no pointer.
"""

import re
from dataclasses import dataclass

from sqlalchemy import Connection, text

from service.adapters.store import AdapterStore
from service.errors import NotFound

_FOLDER = re.compile(r".*/v(\d+)-(\d+)-\d+")

_POLICIES = text("SELECT id, name FROM policies ORDER BY id")

_SKIP = text("""
UPDATE lineages SET next_version = greatest(next_version, :version + 1),
    fencing_token = greatest(fencing_token, :token) + 1, holder = NULL, expires_at = NULL, activity = 'idle'
WHERE policy_id = :policy RETURNING next_version
""")

_VERSIONS = text("""
SELECT version, folder, manifest_sha256 FROM policy_versions
WHERE policy_id = :policy AND folder IS NOT NULL AND files_removed_at IS NULL ORDER BY version
""")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a policy looks like after a restore."""

    policy: str
    next_version: int
    missing: list[int]
    """Versions whose manifest is not in the store, or not the registry's: restore the store, or roll back."""


def recover(connection: Connection, store: AdapterStore) -> list[Recovered]:
    """Raise every policy's counters past whatever its store has seen; say which versions lack files."""
    policies = connection.execute(_POLICIES).all()
    return [_recover(connection, store, policy.id, policy.name) for policy in policies]


def _recover(connection: Connection, store: AdapterStore, policy_id: int, policy: str) -> Recovered:
    seen = [found for folder in store.folders(policy) if (found := _FOLDER.fullmatch(folder))]
    counters = {
        "policy": policy_id,
        "version": max((int(each.group(1)) for each in seen), default=0),
        "token": max((int(each.group(2)) for each in seen), default=0),
    }
    next_version = connection.execute(_SKIP, counters).scalar_one()
    rows = connection.execute(_VERSIONS, {"policy": policy_id})
    missing = [row.version for row in rows if not _is_there(store, row.folder, row.manifest_sha256)]
    return Recovered(policy, next_version, missing)


def _is_there(store: AdapterStore, folder: str, sha256: str) -> bool:
    """Tell whether the store has the manifest that the registry knows."""
    try:
        return store.read_manifest(folder)[1] == sha256
    except (NotFound, ValueError):
        return False
