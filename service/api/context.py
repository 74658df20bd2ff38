"""What routes share: the process's engine, directory, writer, store; and who is asking.

Authentication comes before any work on the body.
"""

import asyncio
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine

from service.adapters.store import AdapterStore
from service.api.admission import Bucket, InFlight
from service.api.directory import Caller, Directory, PolicyEntry
from service.api.pointer_watch import PointerWatch
from service.errors import FieldError, Forbidden, Invalid, Unauthenticated
from service.ingest.group_commit import GroupCommit
from service.ingest.intake import Destination, Intake, Kind
from service.ingest.usage import check_quota
from service.keys import Role
from service.settings import Settings

PARSED_AT_ONCE = 2
_OPEN = Caller("auth is off", frozenset({"admin"}), None)


@dataclass(frozen=True, slots=True)
class Context:
    """One api process."""

    settings: Settings
    engine: Engine
    directory: Directory
    writes: GroupCommit
    store: AdapterStore
    pointers: PointerWatch
    intake: Intake
    in_flight: InFlight
    parsing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARSED_AT_ONCE))
    """Large bodies become ten times their size when parsed: few are, the others wait as bytes."""
    buckets: dict[bytes, Bucket] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpSender:
    """A caller as intake sees it: what its key allows now, what its policies' quotas leave."""

    caller: Caller
    directory: Directory

    @property
    def may_grade(self) -> bool:
        """Tell whether the key carries the role grader."""
        return self.caller.has("grader")

    @property
    def refuses_grades(self) -> bool:
        """Refuse the trace, so that its sender hears of the missing role."""
        return True

    def destination(self, policy: str | None, kind: Kind) -> Destination:
        """Return the policy named, or the key's only one. Raises what forbids it, RateLimited among it."""
        entry = self.directory.policy(permitted_name(self.caller, policy))
        quotas = entry.settings.quotas
        if quotas.traces_per_day is not None or quotas.grades_per_day is not None:
            check_quota(entry.name, quotas, self.directory.used_today(entry.id), kind)
        return entry.destination


def context(request: Request) -> Context:
    """Return the process's context."""
    return cast(Context, request.app.state.context)


def authenticate(request: Request, *roles: Role) -> Caller:
    """Return the caller, who has one of `roles`. Raises Unauthenticated or Forbidden."""
    here = context(request)
    if not here.settings.auth:
        return _OPEN
    return _permitted(here.directory.caller(_bearer(request)), roles)


async def authenticate_waiting(request: Request, *roles: Role) -> Caller:
    """Return the caller, like `authenticate`; the event loop never waits for the database."""
    here = context(request)
    if not here.settings.auth:
        return _OPEN
    key = _bearer(request)
    caller = here.directory.known_caller(key)
    if caller is None:
        caller = await run_in_threadpool(here.directory.caller, key)
    return _permitted(caller, roles)


async def authenticate_sender(request: Request, role: Role) -> tuple[HttpSender, Bucket | None]:
    """Return who sends documents, and the bucket of the key; the event loop never waits for the database.

    Raises Unauthenticated, Forbidden or RateLimited.
    """
    here = context(request)
    caller = await authenticate_waiting(request, role)
    bucket = _bucket(here, caller) if here.settings.auth else None
    if bucket is not None:
        bucket.admit()
    return HttpSender(caller, here.directory), bucket


def permitted_policy(request: Request, caller: Caller, name: str | None) -> PolicyEntry:
    """Return the policy named, or the only one of the key. Raises Forbidden, NotFound or Invalid."""
    return context(request).directory.policy(permitted_name(caller, name))


def permitted_name(caller: Caller, name: str | None) -> str:
    """Return the name of a policy that the key may touch. Raises Forbidden or Invalid."""
    if name is None:
        if caller.policies is None or len(caller.policies) != 1:
            raise Invalid("", [FieldError("/policy", "needed: this key is not scoped to exactly one policy")])
        (name,) = caller.policies
    if caller.policies is not None and name not in caller.policies:
        raise Forbidden(f"This key may not touch policy {name!r}", code="policy")
    return name


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _permitted(caller: Caller | None, roles: tuple[Role, ...]) -> Caller:
    if caller is None:
        raise Unauthenticated("Send `Authorization: Bearer yoro_…` with a key that is valid now")
    if not any(caller.has(role) for role in roles):
        raise Forbidden(f"This needs one of the roles {', '.join(roles)}", code="role")
    return caller


def _bucket(here: Context, caller: Caller) -> Bucket | None:
    rate = caller.rate_per_second or here.settings.key_rate_per_second
    if not rate:
        return None
    bucket = here.buckets.get(caller.digest)
    if bucket is None or bucket.rate != rate:
        bucket = here.buckets[caller.digest] = Bucket(rate)
    return bucket
