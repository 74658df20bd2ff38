"""`/v1/policies`: create, read, revise, pause, resume."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError

from service import presets
from service.api.bodies import read_json
from service.api.context import authenticate, context, permitted_policy
from service.api.directory import PolicyEntry
from service.batches import gates
from service.database import policies
from service.database.engine import transaction
from service.errors import FieldError, Forbidden, Invalid
from service.ingest.formats import native
from service.policies import PolicySettings, locate_base_model, resolve_revision
from service.schemas import NewPolicy

router = APIRouter(tags=["policies"])


@router.post("/v1/policies", status_code=201)
def create_policy(request: Request, document: Annotated[NewPolicy, Body()]) -> dict[str, Any]:
    """Create a policy; its base model is found and pinned now."""
    caller = authenticate(request, "ops")
    if caller.policies is not None and document.name not in caller.policies:
        raise Forbidden(f"This key may not touch policy {document.name!r}", code="policy")
    here = context(request)
    source = locate_base_model(document.base_model, document.base_revision, here.settings.model_root)
    given = document.model_dump(exclude={"name"}, exclude_unset=True)
    pinned = presets.expand(given) | {"base_revision": resolve_revision(source)}
    with transaction(here.engine) as connection:
        policies.create(connection, document.name, PolicySettings.model_validate(pinned))
    here.directory.refresh()
    return describe(here.directory.policy(document.name))


@router.get("/v1/policies")
def list_policies(request: Request) -> dict[str, Any]:
    """List the policies that the key may touch."""
    caller = authenticate(request, "ops", "dashboard", "reader", "agent", "grader")
    allowed = [
        entry
        for entry in context(request).directory.policies()
        if caller.policies is None or entry.name in caller.policies
    ]
    return {"policies": [describe(entry) for entry in allowed]}


@router.get("/v1/policies/{policy}")
def show_policy(request: Request, policy: str) -> dict[str, Any]:
    """Show one policy with all of its settings."""
    caller = authenticate(request, "ops", "dashboard", "reader", "agent", "grader")
    return describe(permitted_policy(request, caller, policy))


@router.patch("/v1/policies/{policy}")
async def revise_policy(request: Request, policy: str) -> dict[str, Any]:
    """Merge a partial document (RFC 7396) into the settings, as a new revision; expand a `preset`."""
    caller = authenticate(request, "ops")
    entry = permitted_policy(request, caller, policy)
    changes, _ = await read_json(request, context(request).settings.limits)
    return await run_in_threadpool(_revise, request, entry, changes)


@router.post("/v1/policies/{policy}/pause")
def pause_policy(request: Request, policy: str) -> dict[str, Any]:
    """Stop forming and training batches; intake goes on."""
    return _set_paused(request, policy, paused=True)


@router.post("/v1/policies/{policy}/resume")
def resume_policy(request: Request, policy: str) -> dict[str, Any]:
    """Go on forming and training batches."""
    return _set_paused(request, policy, paused=False)


def describe(entry: PolicyEntry) -> dict[str, Any]:
    """Return a policy as the API shows it."""
    return {
        "name": entry.name,
        "settings_revision": entry.revision,
        "paused": entry.paused,
        "created_at": entry.created_at.isoformat(),
        "settings": entry.settings.model_dump(mode="json"),
    }


def _revise(request: Request, entry: PolicyEntry, changes: Any) -> dict[str, Any]:
    if not isinstance(changes, dict):
        raise Invalid("", [FieldError("", "must be an object")])
    here = context(request)
    with transaction(here.engine) as connection:
        try:
            policies.revise(connection, entry.id, presets.expand(changes))
        except ValidationError as error:
            raise native.invalid(error) from error
        gates.evaluate_policy(connection, entry.id)
    here.directory.refresh()
    return describe(here.directory.policy(entry.name))


def _set_paused(request: Request, policy: str, *, paused: bool) -> dict[str, Any]:
    caller = authenticate(request, "ops")
    entry = permitted_policy(request, caller, policy)
    here = context(request)
    with transaction(here.engine) as connection:
        policies.set_paused(connection, entry.id, paused)
    here.directory.refresh()
    return describe(here.directory.policy(entry.name))
