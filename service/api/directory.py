"""What every request needs at once: API keys and policies, kept in memory and refreshed twice a second.

A revoked key or a changed policy is seen by every process within a second; requests with unknown
keys cost the database nothing beyond that. Knows no HTTP.
"""

import hmac
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, text

from service import keys, telemetry
from service.api.admission import Bucket
from service.database.engine import transaction
from service.errors import NotFound, Unavailable
from service.ingest import usage
from service.ingest.intake import Destination
from service.ingest.masking import MaskFunction, compiled
from service.ingest.usage import Usage
from service.keys import Role
from service.policies import PolicySettings

REFRESH_SECONDS = 0.4
LOOKS_PER_SECOND = 10.0
"""How often, on average, the database is asked at once for a key or policy that memory does not know."""
STALE_SECONDS = 5.0
"""Age of the snapshot beyond which nothing is answered from it."""

_KEYS = text("""
SELECT name, digest, roles, policies, expires_at, rate_per_second FROM api_keys
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
    digest: bytes = b""
    expires_at: datetime | None = None
    rate_per_second: float | None = None

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
    destination: Destination


@dataclass(frozen=True, slots=True)
class _Snapshot:
    callers: Mapping[bytes, Caller]
    policies: Mapping[str, PolicyEntry]
    usage: Mapping[int, Usage]
    taken_at: float


class Directory:
    """Keys and policies of the last half second."""

    def __init__(self, engine: Engine, functions: Mapping[str, MaskFunction] | None = None) -> None:
        """Read once; `start` keeps it fresh. `functions`: what policies may mask with."""
        self._engine = engine
        self._functions = functions or {}
        self._entries: dict[tuple[int, int, bool], PolicyEntry] = {}
        self._stop = threading.Event()
        self._reading = threading.Lock()
        self._looks = Bucket(LOOKS_PER_SECOND)
        self._snapshot = self._read()

    def start(self) -> None:
        """Refresh in the background until `close`."""
        threading.Thread(target=self._run, name="directory", daemon=True).start()

    def close(self) -> None:
        """Stop refreshing."""
        self._stop.set()

    def known_caller(self, key: str) -> Caller | None:
        """Return who a bearer key belongs to, from memory; None for an unknown, expired or revoked one."""
        digest = keys.digest(key)
        found = self._fresh().callers.get(digest[:8])
        # The look-up tells at most eight bytes of a digest; the comparison takes equally long for all.
        if found is None or not hmac.compare_digest(found.digest, digest):
            return None
        return None if found.expires_at and found.expires_at <= datetime.now(UTC) else found

    def caller(self, key: str) -> Caller | None:
        """Return who a bearer key belongs to, looking once more for one made just now."""
        found = self.known_caller(key)
        if found is None:
            self.look_again()
            found = self.known_caller(key)
        return found

    def known_policy(self, name: str) -> PolicyEntry | None:
        """Return a policy by name, from memory."""
        return self._fresh().policies.get(name)

    def policy(self, name: str) -> PolicyEntry:
        """Return a policy by name, looking once more for one made just now. Raises NotFound."""
        entry = self.known_policy(name)
        if entry is None:
            self.look_again()
            entry = self.known_policy(name)
        if entry is None:
            raise NotFound(f"There is no policy {name!r}", code="policy_not_found")
        return entry

    def used_today(self, policy_id: int) -> Usage:
        """Return what a policy with quotas took in today, as of half a second ago."""
        return self._snapshot.usage.get(policy_id, Usage())

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

    def look_again(self) -> None:
        """Look once more for something new, ten times a second whoever asks. Waits for the database."""
        if self._looks.take():
            self.refresh()

    def _read(self) -> _Snapshot:
        with transaction(self._engine) as connection:
            callers = {
                bytes(row.digest[:8]): Caller(
                    row.name, frozenset(row.roles), None if row.policies is None else frozenset(row.policies),
                    bytes(row.digest), row.expires_at, row.rate_per_second,
                )
                for row in connection.execute(_KEYS)
            }  # fmt: skip
            entries = [self._entry(row) for row in connection.execute(_POLICIES)]
            used = usage.today(connection) if any(_has_quotas(entry) for entry in entries) else {}
        self._entries = {(entry.id, entry.revision, entry.paused): entry for entry in entries}
        return _Snapshot(callers, {entry.name: entry for entry in entries}, used, time.monotonic())

    def _entry(self, row: Any) -> PolicyEntry:
        known = self._entries.get((row.id, row.settings_revision, row.paused))
        if known is not None:
            return known
        settings = PolicySettings.model_validate(row.document)
        destination = Destination(row.id, row.name, settings, compiled(settings.masking, self._functions))
        return PolicyEntry(
            row.id, row.name, row.settings_revision, row.paused, row.created_at, settings, destination
        )


def _has_quotas(entry: PolicyEntry) -> bool:
    quotas = entry.settings.quotas
    return quotas.traces_per_day is not None or quotas.grades_per_day is not None
