"""Moving `promoted` and pinning versions: what people do to versions that never change themselves.

Must run inside the caller's transaction, which these functions make hold the lineage row: the trainer's
commit, a rewind and retention lock it too. Invariants: a pointer names only a version whose files are
there; every move is recorded with its reason (a trigger writes it). Rewinding the trainer is another
thing: service/batches/rewind.py.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from service.errors import Conflict, NotFound

_HOLD = text("SELECT head_version, promoted_version FROM lineages WHERE policy_id = :policy FOR UPDATE")

_VERSION = text("""
SELECT version, tainted, rewound, files_removed_at IS NOT NULL AS gone FROM policy_versions
WHERE policy_id = :policy AND version = :version
""")

_SAY_WHY = text("SELECT set_config('yoro.reason', :reason, true)")

_MOVE = text("""
UPDATE lineages SET promoted_version = :version, promotion_held = :held WHERE policy_id = :policy
""")

_PIN = text("UPDATE policy_versions SET pinned = :pinned WHERE policy_id = :policy AND version = :version")

_MOVES = text("""
SELECT id, pointer, from_version, to_version, reason, moved_at FROM pointer_moves
WHERE policy_id = :policy AND id < :before ORDER BY id DESC LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class Moved:
    """Where `promoted` pointed and where it points now."""

    before: int
    after: int


def hold(connection: Connection, policy_id: int) -> Any:
    """Lock the lineage row and return its pointers."""
    return connection.execute(_HOLD, {"policy": policy_id}).one()


def say_why(connection: Connection, reason: str) -> None:
    """Give the reason that the record of this transaction's moves will carry."""
    connection.execute(_SAY_WHY, {"reason": reason})


def promote(
    connection: Connection, policy_id: int, version: int, *, reason: str, force: bool = False
) -> Moved:
    """Point `promoted` at a version and end a hold. `force` takes a tainted one.

    Raises NotFound, Conflict (`version_rewound`, `version_gone`, `version_tainted`).
    """
    return _move(connection, policy_id, version, reason=reason, force=force, held=False)


def roll_back(
    connection: Connection, policy_id: int, version: int, *, reason: str, force: bool = False
) -> Moved:
    """Point `promoted` at an older version and hold it there: no step moves it until somebody promotes.

    Raises as `promote`, and Conflict (`not_older`) for a version that is no step back.
    """
    before = hold(connection, policy_id).promoted_version
    if version > before:
        raise Conflict(f"Version {before} is promoted: {version} is no step back", code="not_older")
    return _move(connection, policy_id, version, reason=reason, force=force, held=True)


def pin(connection: Connection, policy_id: int, version: int, *, pinned: bool) -> None:
    """Keep a version's files whatever retention says, or stop doing so. Raises NotFound, Conflict."""
    hold(connection, policy_id)
    found = find(connection, policy_id, version)
    if pinned:
        refuse_without_files(found)
    connection.execute(_PIN, {"policy": policy_id, "version": version, "pinned": pinned})


def moves(connection: Connection, policy_id: int, *, before: int, limit: int) -> list[dict[str, Any]]:
    """Return the record of both pointers' moves, newest first."""
    rows = connection.execute(_MOVES, {"policy": policy_id, "before": before, "limit": limit})
    return [
        {
            "id": row.id, "pointer": row.pointer, "from": row.from_version, "to": row.to_version,
            "reason": row.reason, "moved_at": row.moved_at.isoformat(),
        }
        for row in rows
    ]  # fmt: skip


def find(connection: Connection, policy_id: int, version: int) -> Any:
    """Return what may stand against pointing at a version. Raises NotFound."""
    row = connection.execute(_VERSION, {"policy": policy_id, "version": version}).one_or_none()
    if row is None:
        raise NotFound(f"There is no version {version}", code="version_not_found")
    return row


def refuse_without_files(found: Any) -> None:
    """Raise Conflict if retention has removed the version's files."""
    if found.gone:
        raise Conflict(f"The files of version {found.version} were removed by retention", code="version_gone")


def refuse_tainted(found: Any, force: bool) -> None:
    """Raise Conflict for a tainted version, unless forced."""
    if found.tainted and not force:
        reasons = ", ".join(found.tainted)
        raise Conflict(f"Version {found.version} is tainted: {reasons}", code="version_tainted")


def _move(
    connection: Connection, policy_id: int, version: int, *, reason: str, force: bool, held: bool
) -> Moved:
    before = hold(connection, policy_id).promoted_version
    found = find(connection, policy_id, version)
    refuse_without_files(found)
    refuse_tainted(found, force)
    if found.rewound:
        raise Conflict(
            f"Version {version} was rewound away: what it samples would not be trained",
            code="version_rewound",
        )
    say_why(connection, reason)
    connection.execute(_MOVE, {"policy": policy_id, "version": version, "held": held})
    return Moved(before, version)
