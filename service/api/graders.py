"""`/v1/graders`: quarantine of graders whose grades should not count, and its end."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from service.api.context import authenticate, context, permitted_policy
from service.batches import quarantine
from service.database.engine import transaction
from service.ingest.formats.native import in_utc
from service.schemas import Identifier, Moment, Wire

router = APIRouter(tags=["graders"])


class Quarantine(Wire):
    """Which grades stop counting."""

    policy: str | None = None
    since: Moment | None = Field(None, description="Grades graded (or received) from then on; null: all.")


@router.post("/v1/graders/{grader}/quarantine")
def impose(request: Request, grader: Identifier, document: Quarantine) -> dict[str, Any]:
    """Stop counting a grader's grades; versions trained on them are marked tainted."""
    caller = authenticate(request, "ops")
    entry = permitted_policy(request, caller, document.policy)
    since = None if document.since is None else in_utc(document.since)
    with transaction(context(request).engine) as connection:
        done = quarantine.impose(connection, entry.id, grader, since)
    return {"policy": entry.name, "grader": grader, **asdict(done)}


@router.delete("/v1/graders/{grader}/quarantine")
def lift(request: Request, grader: Identifier, policy: str | None = None) -> dict[str, Any]:
    """Let a grader's grades count again; versions stay marked."""
    caller = authenticate(request, "ops")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        quarantine.lift(connection, entry.id, grader)
    return {"policy": entry.name, "grader": grader, "status": "lifted"}


@router.get("/v1/graders/quarantines")
def list_quarantines(request: Request, policy: str | None = None) -> dict[str, Any]:
    """List the graders in quarantine."""
    caller = authenticate(request, "ops", "dashboard", "reader")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        return {"policy": entry.name, "quarantines": quarantine.in_force(connection, entry.id)}
