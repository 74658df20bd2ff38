"""`/v1/policies/{p}`: `/versions/compare`, `/steps` and `/batches/{n}`, for dashboards."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request

from service.api.context import authenticate, context, permitted_policy
from service.batches import comparison, reports
from service.database.engine import transaction

router = APIRouter(tags=["dashboards"])
Number = Annotated[int, Query(ge=0, le=2**31 - 1)]
MOST = 2**31 - 1


@router.get("/v1/policies/{policy}/versions/compare")
def compare_versions(request: Request, policy: str, a: Number, b: Number) -> dict[str, Any]:
    """Compare the rewards of what two versions sampled, raw and net of difficulty, with intervals."""
    caller = authenticate(request, "dashboard", "ops", "reader")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        return {"policy": entry.name, **comparison.compare(connection, entry.id, a, b)}


@router.get("/v1/policies/{policy}/steps")
def list_steps(
    request: Request, policy: str, cursor: Number = MOST, limit: Annotated[int, Query(ge=1, le=500)] = 50
) -> dict[str, Any]:
    """List ended batches, newest first, with their metrics; `next_cursor` continues."""
    caller = authenticate(request, "dashboard", "ops", "reader")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        return reports.steps(connection, entry.id, before=cursor, limit=limit)


@router.get("/v1/policies/{policy}/batches/{number}")
def show_batch(request: Request, policy: str, number: Annotated[int, Path(ge=1, le=MOST)]) -> dict[str, Any]:
    """Show one batch: members, rewards, baselines, advantages, neighbours, what became of it."""
    caller = authenticate(request, "dashboard", "ops", "reader")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        return {"policy": entry.name, **reports.batch(connection, entry.id, number)}
