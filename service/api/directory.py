"""What every request needs at once: API keys and policies, kept in memory and refreshed twice a second.

A revoked key or a changed policy is seen by every process within a second; requests with unknown
keys cost the database nothing beyond that. Knows no HTTP.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine, text

from service import keys, telemetry
from service.database.engine import transaction
from service.errors import NotFound, Unavailable
from service.keys import Role
from service.policies import PolicySettings

REFRESH_SECONDS = 0.4
AGAIN_SECONDS = 0.1
"""A key or policy made a moment ago by another process is found after at most this long."""
STALE_SECONDS = 5.0
"""Age of the snapshot beyond which nothing is answered from it."""

_KEYS = text("""
SELECT name, digest, roles, policies, expires_at FROM api_keys
WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())
""")

_POLICIES = text("""
SELECT p.id, p.name, p.settings_revision, p.paused, p.created_at, s.document
FROM policies p JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
""")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what the key allows."""

    name: str
    roles: frozenset[str]
    policies: frozenset[str] | None

    def has(self, role: Role) -> bool:
        """Tell whether the key carries a role; `admin` carries all."""
        return role in self.roles or "admin" in self.roles


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy as requests see it."""

    id: int
    name: str
    revision: int
    paused: bool
    created_at: datetime
    settings: PolicySettings


@dataclass(frozen=True, slots=True)
class _Snapshot:
    callers: Mapping[bytes, Caller]
    policies: Mapping[str, PolicyEntry]
    taken_at: float


class Directory:
    """Keys and policies of the last half second."""

    def __init__(self, engine: Engine) -> None:
        """Read once; `start` keeps it fresh."""
        self._engine = engine
        self._stop = threading.Event()
        self._reading = threading.Lock()
        self._missed_at = 0.0
        self._snapshot = self._read()

    def start(self) -> None:
        """Refresh in the background until `close`."""
        threading.Thread(target=self._run, name="directory", daemon=True).start()

    def close(self) -> None:
        """Stop refreshing."""
        self._stop.set()

    def caller(self, key: str) -> Caller | None:
        """Return who a bearer key belongs to; None for an unknown, expired or revoked one."""
        digest = keys.digest(key)
        return self._fresh().callers.get(digest) or self._again().callers.get(digest)

    def policy(self, name: str) -> PolicyEntry:
        """Return a policy by name. Raises NotFound."""
        entry = self._fresh().policies.get(name) or self._again().policies.get(name)
        if entry is None:
            raise NotFound(f"There is no policy {name!r}", code="policy_not_found")
        return entry

    def policies(self) -> list[PolicyEntry]:
        """Return all policies by name."""
        return sorted(self._fresh().policies.values(), key=lambda entry: entry.name)

    def refresh(self) -> None:
        """Read again now; a process that changed something calls it to see its own change."""
        with self._reading:
            self._snapshot = self._read()

    def _run(self) -> None:
        while not self._stop.wait(REFRESH_SECONDS):
            try:
                self.refresh()
            except Unavailable as error:
                telemetry.logger().warning("directory_not_refreshed", detail=error.detail)

    def _fresh(self) -> _Snapshot:
        if time.monotonic() - self._snapshot.taken_at > STALE_SECONDS:
            raise Unavailable("The database has not answered for a while")
        return self._snapshot

    def _again(self) -> _Snapshot:
        """Look once more for something new, at most ten times a second whoever asks."""
        now = time.monotonic()
        if now - self._missed_at > AGAIN_SECONDS:
            self._missed_at = now
            self.refresh()
        return self._snapshot

    def _read(self) -> _Snapshot:
        with transaction(self._engine) as connection:
            callers = {
                bytes(row.digest): Caller(
                    row.name,
                    frozenset(row.roles),
                    None if row.policies is None else frozenset(row.policies),
                )
                for row in connection.execute(_KEYS)
            }
            policies = {
                row.name: PolicyEntry(
                    row.id, row.name, row.settings_revision, row.paused, row.created_at,
                    PolicySettings.model_validate(row.document),
                )
                for row in connection.execute(_POLICIES)
            }  # fmt: skip
        return _Snapshot(callers, policies, time.monotonic())
