"""API keys: minting, revoking, and the roles they carry.

A key is `yoro_` + 43 characters (256 random bits), so a plain SHA-256 of it is safe to store and to
look up; the key itself is shown once. Knows no HTTP.
"""

import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, get_args

from sqlalchemy import Connection, text

from service.errors import FieldError, Invalid, NotFound

Role = Literal["agent", "grader", "ops", "dashboard", "reader", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
PREFIX = "yoro_"
_SHOWN_CHARACTERS = 12

_INSERT = text("""
INSERT INTO api_keys (name, prefix, digest, roles, policies, expires_at, rate_per_second)
VALUES (:name, :prefix, :digest, :roles, :policies, :expires_at, :rate_per_second) RETURNING id
""")

_STORED = text("""
SELECT prefix, name, roles, policies, rate_per_second, created_at, expires_at, revoked_at
FROM api_keys ORDER BY id DESC
""")

_REVOKE = text("""
UPDATE api_keys SET revoked_at = coalesce(revoked_at, clock_timestamp()) WHERE prefix = :prefix RETURNING id
""")


def mint(
    connection: Connection,
    name: str,
    roles: Sequence[str],
    policies: Sequence[str] | None = None,
    expires_at: datetime | None = None,
    *,
    rate_per_second: float | None = None,
) -> str:
    """Create a key and return it; it cannot be read again. Raises Invalid for an unknown role."""
    unknown = sorted(set(roles) - set(ROLES))
    if unknown or not roles:
        raise Invalid("", [FieldError("/roles", f"must be some of {', '.join(ROLES)}, got {list(roles)}")])
    key = PREFIX + secrets.token_urlsafe(32)
    connection.execute(
        _INSERT,
        {
            "name": name, "prefix": shown(key), "digest": digest(key), "roles": list(roles),
            "policies": None if policies is None else list(policies), "expires_at": expires_at,
            "rate_per_second": rate_per_second,
        },
    )  # fmt: skip
    return key


def shown(key: str) -> str:
    """Return the part of a key that lists show and `revoke` takes."""
    return key[:_SHOWN_CHARACTERS]


def stored(connection: Connection) -> list[dict[str, Any]]:
    """Return every key as it is stored, newest first."""
    rows = connection.execute(_STORED).mappings()
    return [
        {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}
        for row in rows
    ]


def revoke(connection: Connection, prefix: str) -> None:
    """Revoke the key with this prefix, for good. Raises NotFound."""
    if not connection.execute(_REVOKE, {"prefix": prefix}).all():
        raise NotFound(f"No key starts with {prefix}", code="key_not_found")


def digest(key: str) -> bytes:
    """Return what is stored of a key."""
    return hashlib.sha256(key.encode()).digest()
