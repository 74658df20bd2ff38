"""What routes share: the process's engine, directory, writer, store; and who is asking.

Authentication comes before any work on the body.
"""

from dataclasses import dataclass
from typing import cast

from fastapi import Request
from sqlalchemy import Engine

from service.adapters.store import AdapterStore
from service.api.directory import Caller, Directory, PolicyEntry
from service.errors import FieldError, Forbidden, Invalid, Unauthenticated
from service.ingest.group_commit import GroupCommit
from service.keys import Role
from service.settings import Settings

_OPEN = Caller("auth is off", frozenset({"admin"}), None)


@dataclass(frozen=True, slots=True)
class Context:
    """One api process."""

    settings: Settings
    engine: Engine
    directory: Directory
    writes: GroupCommit
    store: AdapterStore
    fingerprint_key: bytes


def context(request: Request) -> Context:
    """Return the process's context."""
    return cast(Context, request.app.state.context)


def authenticate(request: Request, *roles: Role) -> Caller:
    """Return the caller, who has one of `roles`. Raises Unauthenticated or Forbidden."""
    here = context(request)
    if not here.settings.auth:
        return _OPEN
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    caller = here.directory.caller(key.strip()) if scheme.lower() == "bearer" else None
    if caller is None:
        raise Unauthenticated("Send `Authorization: Bearer yoro_…` with a key that is valid now")
    if not any(caller.has(role) for role in roles):
        raise Forbidden(f"This needs one of the roles {', '.join(roles)}", code="role")
    return caller


def permitted_policy(request: Request, caller: Caller, name: str | None) -> PolicyEntry:
    """Return the policy named, or the only one of the key. Raises Forbidden, NotFound or Invalid."""
    if name is None:
        if caller.policies is None or len(caller.policies) != 1:
            raise Invalid("", [FieldError("/policy", "needed: this key is not scoped to exactly one policy")])
        (name,) = caller.policies
    if caller.policies is not None and name not in caller.policies:
        raise Forbidden(f"This key may not touch policy {name!r}", code="policy")
    return context(request).directory.policy(name)
