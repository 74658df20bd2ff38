"""Rows of a policy: its identity, its settings' revisions, its lineage and version 0."""

import json
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from service.eligibility import GATE_PARTS
from service.errors import Conflict, FieldError, Invalid
from service.policies import PolicySettings

FIXED = ("base_model", "base_revision", "adapter")
"""Settings that never change: the lineage's weights depend on them."""

_INSERT = text("INSERT INTO policies (name) VALUES (:name) RETURNING id")
_REVISION = text("""
INSERT INTO settings_revisions (policy_id, revision, document, reason)
VALUES (:policy, :revision, CAST(:document AS jsonb), :reason)
""")
_LINEAGE = text("INSERT INTO lineages (policy_id) VALUES (:policy)")
_BASE = text(
    "INSERT INTO policy_versions (policy_id, version, depth, fencing_token) VALUES (:policy, 0, 0, 0)"
)
_LOCK = text("""
SELECT p.settings_revision, s.document FROM policies p
JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
WHERE p.id = :policy FOR UPDATE OF p
""")
_POINT = text("""
UPDATE policies p SET settings_revision = :revision, gate_epoch = gate_epoch + :opens,
    -- rewards of another rule are not comparable: guards look at later batches only
    guards_from_batch = CASE WHEN :other_rewards THEN l.next_batch ELSE p.guards_from_batch END
FROM lineages l WHERE p.id = :policy AND l.policy_id = p.id
""")
_PAUSE = text("""
UPDATE policies SET paused = :paused, paused_code = '', paused_reason = '' WHERE id = :policy
""")


def create(connection: Connection, name: str, settings: PolicySettings) -> int:
    """Create a policy with revision 1 of its settings and version 0. Raises Conflict if the name is taken."""
    try:
        with connection.begin_nested():
            policy_id: int = connection.execute(_INSERT, {"name": name}).scalar_one()
    except IntegrityError as error:
        raise Conflict(f"There is a policy {name!r} already", code="policy_exists") from error
    connection.execute(
        _REVISION,
        {"policy": policy_id, "revision": 1, "document": settings.model_dump_json(), "reason": ""},
    )
    connection.execute(_LINEAGE, {"policy": policy_id})
    connection.execute(_BASE, {"policy": policy_id})
    return policy_id


def revise(connection: Connection, policy_id: int, changes: dict[str, object], *, reason: str = "") -> int:
    """Merge changes into the settings as a new revision and return its number. Raises Invalid.

    `reason`: why a guard changes them; empty for a person.
    """
    row = connection.execute(_LOCK, {"policy": policy_id}).one()
    merged = _merge(row.document, changes)
    for name in FIXED:
        if merged.get(name) != row.document.get(name):
            raise Invalid(
                "",
                [FieldError(f"/{name}", "never changes; make a new policy")],
                code="fixed_setting",
            )
    settings = PolicySettings.model_validate(merged)
    revision: int = row.settings_revision + 1
    connection.execute(
        _REVISION,
        {
            "policy": policy_id, "revision": revision, "document": settings.model_dump_json(),
            "reason": reason,
        },
    )  # fmt: skip
    # Compared with defaults filled in: a part that an older release did not know is no change.
    before = PolicySettings.model_validate(row.document).model_dump()
    after = settings.model_dump()
    opens = any(_part(before, path) != _part(after, path) for path in GATE_PARTS)
    connection.execute(
        _POINT,
        {
            "policy": policy_id, "revision": revision, "opens": int(opens),
            "other_rewards": before["reward"] != after["reward"],
        },
    )  # fmt: skip
    return revision


def set_paused(connection: Connection, policy_id: int, paused: bool) -> None:
    """Pause or resume the forming and training of batches, as a person wishes."""
    connection.execute(_PAUSE, {"policy": policy_id, "paused": paused})


def _part(document: dict[str, Any], path: tuple[str, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


def _merge(document: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """Merge as RFC 7396 does, for objects that the document has."""
    merged = json.loads(json.dumps(document))
    for name, value in changes.items():
        inner = merged.get(name)
        merged[name] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return dict(merged)
