"""`/v1/keys`: create, list, revoke API keys; role `admin` only."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from service import keys
from service.api.context import authenticate, context
from service.database.engine import transaction
from service.policies import PolicyName
from service.schemas import Label, Wire

router = APIRouter(tags=["keys"])


class NewKey(Wire):
    """What a key is for. `policies` null: all of them."""

    name: Label
    roles: list[keys.Role] = Field(min_length=1)
    policies: list[PolicyName] | None = None
    expires_in_days: Annotated[float, Field(gt=0, le=36_500)] | None = None
    rate_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Documents a second that each api process takes from it; null: the server's default."""


@router.post("/v1/keys", status_code=201)
def create_key(request: Request, document: NewKey) -> dict[str, Any]:
    """Create a key; this answer is the only place where it stands."""
    authenticate(request, "admin")
    days = document.expires_in_days
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    here = context(request)
    with transaction(here.engine) as connection:
        key = keys.mint(
            connection,
            document.name,
            document.roles,
            document.policies,
            expires_at,
            rate_per_second=document.rate_per_second,
        )
    here.directory.refresh()
    return {"key": key, "prefix": keys.shown(key), "name": document.name, "roles": document.roles}


@router.get("/v1/keys")
def list_keys(request: Request) -> dict[str, Any]:
    """List keys by what is stored of them, newest first."""
    authenticate(request, "admin")
    with transaction(context(request).engine) as connection:
        return {"keys": keys.stored(connection)}


@router.delete("/v1/keys/{prefix}")
def revoke_key(request: Request, prefix: str) -> dict[str, Any]:
    """Revoke the key with this prefix; every process refuses it within a second."""
    authenticate(request, "admin")
    here = context(request)
    with transaction(here.engine) as connection:
        keys.revoke(connection, prefix)
    here.directory.refresh()
    return {"prefix": prefix, "status": "revoked"}
