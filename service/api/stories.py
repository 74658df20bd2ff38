"""`GET /v1/traces/{id}`, `GET /v1/traces`, `DELETE /v1/traces/{id}`: one trace's story, lists, erasure."""

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from service.api.context import authenticate, context, permitted_policy
from service.batches import erasure, stories
from service.batches.stories import Steps
from service.database.engine import transaction
from service.errors import FieldError, Invalid
from service.schemas import Identifier

router = APIRouter(tags=["traces"])
State = Literal["waiting_reward", "ready", "batched", "trained", "excluded"]


@router.get("/v1/traces/{trace_id}")
def show_trace(
    request: Request,
    trace_id: Identifier,
    policy: str | None = None,
    step: Annotated[int, Query(ge=0)] = 0,
    steps: Annotated[int, Query(ge=1, le=500)] = 50,
) -> dict[str, Any]:
    """Tell one trace's whole story; `step` and `steps` page its messages. 410 when it was erased."""
    caller = authenticate(request, "reader")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        found = stories.story(connection, entry.id, trace_id, Steps(step, steps))
    return {"policy": entry.name, **found}


@router.get("/v1/traces")
def list_traces(
    request: Request,
    *,
    policy: str | None = None,
    state: State | None = None,
    reason: str | None = None,
    cursor: str = "",
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> dict[str, Any]:
    """List traces, newest first, of a state and a reason in it; `next_cursor` continues."""
    caller = authenticate(request, "reader")
    entry = permitted_policy(request, caller, policy)
    if reason is not None and state is None:
        raise Invalid("", [FieldError("/reason", "needs `state`")])
    with transaction(context(request).engine) as connection:
        return stories.page(connection, entry.id, state=state, reason=reason, cursor=cursor, limit=limit)


@router.delete("/v1/traces/{trace_id}")
def erase_trace(request: Request, trace_id: Identifier, policy: str | None = None) -> dict[str, Any]:
    """Erase a trace for good: its document, what was derived from it, its id. Repeating is harmless."""
    caller = authenticate(request, "ops")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        erased = erasure.erase(connection, entry.id, trace_id)
    return {"trace_id": trace_id, "status": "erased", **asdict(erased)}
