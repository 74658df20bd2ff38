"""Versions of a policy and the pointers to them, read for people and pullers.

Knows no files (see store.py). Invariants: a version never changes; `latest` (the head) and
`promoted` are the only things that move.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, text

from service.errors import NotFound

Pointer = Literal["latest", "promoted"]

_COLUMNS = (
    "v.version, v.parent, v.depth, v.folder, v.manifest, v.manifest_sha256, v.tainted, v.created_at, "
    "v.rewound, v.pinned, v.files_removed_at"
)

_BY_NUMBER = text(f"""
SELECT {_COLUMNS} FROM policy_versions v WHERE v.policy_id = :policy AND v.version = :version
""")  # noqa: S608 - our own column list

_BY_POINTER = text(f"""
SELECT {_COLUMNS} FROM lineages l JOIN policy_versions v ON v.policy_id = l.policy_id
    AND v.version = CASE :pointer WHEN 'latest' THEN l.head_version ELSE l.promoted_version END
WHERE l.policy_id = :policy
""")  # noqa: S608 - our own column list

_PAGE = text(f"""
SELECT {_COLUMNS} FROM policy_versions v
WHERE v.policy_id = :policy AND v.version < :before AND v.version > 0
ORDER BY v.version DESC LIMIT :limit
""")  # noqa: S608 - our own column list


_POINTERS = text("""
SELECT l.policy_id, o.name AS policy, p.pointer, v.version, v.manifest_sha256,
       cardinality(v.tainted) AS taints, v.rewound, v.pinned, v.files_removed_at IS NOT NULL AS gone
FROM lineages l
JOIN policies o ON o.id = l.policy_id
CROSS JOIN LATERAL (VALUES ('latest', l.head_version), ('promoted', l.promoted_version))
    AS p (pointer, version)
JOIN policy_versions v ON v.policy_id = l.policy_id AND v.version = p.version
""")


@dataclass(frozen=True, slots=True)
class Pointed:
    """Where a pointer of a policy points, and the ETag of what stands there."""

    policy: str
    version: int
    etag: str


@dataclass(frozen=True, slots=True)
class Version:
    """One published version; version 0, the base model, has neither folder nor manifest."""

    version: int
    parent: int | None
    depth: int
    folder: str | None
    manifest: Mapping[str, Any]
    manifest_sha256: str | None
    tainted: tuple[str, ...]
    created_at: datetime
    rewound: bool
    pinned: bool
    files_removed_at: datetime | None

    @property
    def etag(self) -> str:
        """Return a strong ETag of `describe`: what never changes, and the marks that may."""
        return revision_etag(
            self.version, self.manifest_sha256, len(self.tainted),
            (self.rewound, self.pinned, self.files_removed_at is not None),
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Return what the API shows: the manifest, and what may have been said of the version since."""
        return {
            **self.manifest,
            "version": self.version,
            "parent": self.parent,
            "depth": self.depth,
            "manifest_sha256": self.manifest_sha256,
            "tainted": list(self.tainted),
            "rewound": self.rewound,
            "pinned": self.pinned,
            "files_removed_at": self.files_removed_at and self.files_removed_at.isoformat(),
            "created_at": self.created_at.isoformat(),
        }


def revision_etag(version: int, sha256: str | None, taints: int, marks: tuple[bool, ...]) -> str:
    """Return the ETag of a version's description."""
    return f'"{version}-{sha256 or "base"}-{taints}{"".join("ny"[mark] for mark in marks)}"'


def pointers(connection: Connection) -> dict[tuple[int, Pointer], Pointed]:
    """Return where every policy's pointers point: two narrow rows a policy."""
    return {
        (row.policy_id, row.pointer): Pointed(
            row.policy,
            row.version,
            revision_etag(row.version, row.manifest_sha256, row.taints, (row.rewound, row.pinned, row.gone)),
        )
        for row in connection.execute(_POINTERS)
    }


def by_number(connection: Connection, policy_id: int, version: int) -> Version:
    """Return one version. Raises NotFound."""
    row = connection.execute(_BY_NUMBER, {"policy": policy_id, "version": version}).one_or_none()
    if row is None:
        raise NotFound(f"There is no version {version}", code="version_not_found")
    return _version(row)


def by_pointer(connection: Connection, policy_id: int, pointer: Pointer) -> Version:
    """Return the version that `latest` or `promoted` points to."""
    return _version(connection.execute(_BY_POINTER, {"policy": policy_id, "pointer": pointer}).one())


def page(connection: Connection, policy_id: int, *, before: int, limit: int) -> list[Version]:
    """Return versions below `before`, newest first."""
    rows = connection.execute(_PAGE, {"policy": policy_id, "before": before, "limit": limit})
    return [_version(row) for row in rows]


def _version(row: Any) -> Version:
    return Version(
        row.version, row.parent, row.depth, row.folder, row.manifest or {}, row.manifest_sha256,
        tuple(row.tainted), row.created_at, row.rewound, row.pinned, row.files_removed_at,
    )  # fmt: skip
