"""`/v1/policies/{p}`: promote, roll back, pin; the record of pointers' moves and of gates' verdicts.

Rolling back what serves and rewinding the trainer are two operations: the second happens only where it
is asked for. Every move is recorded with who asked for it.
"""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Request
from pydantic import Field

from service.adapters import pointers, promotion
from service.adapters.pointers import Moved
from service.api.adapters import permitted
from service.api.context import Context, authenticate, context, permitted_policy
from service.batches.rewind import rewind
from service.database.engine import transaction
from service.schemas import Wire

router = APIRouter(tags=["ops"])
NEWEST = 2**62
Number = Annotated[int, Path(ge=0, le=2**31 - 1)]
Note = Annotated[str, Field(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Goes into the record of the move."""


class Promote(Wire):
    """What to mind when promoting."""

    force: bool = False
    """Take a tainted version too."""
    note: Note = ""


class Rollback(Wire):
    """Where to go back to."""

    to: Annotated[int, Field(ge=0, le=2**31 - 1)]
    rewind_trainer: bool = False
    """Train on from there too; else only what serves goes back, and is held there until a promotion."""
    force: bool = False
    """Take a tainted version too."""
    note: Note = ""


@router.post("/v1/policies/{policy}/adapters/{version}/promote")
def promote_version(
    request: Request, policy: str, version: Number, document: Annotated[Promote | None, Body()] = None
) -> dict[str, Any]:
    """Point `promoted` at a version; promoting it again changes nothing."""
    here, policy_id, name = _operator(request, policy)
    wish = document or Promote()
    reason = _reason("promote", name, wish.note)
    with transaction(here.engine) as connection:
        moved = pointers.promote(connection, policy_id, version, reason=reason, force=wish.force)
    here.pointers.refresh()
    return _moved(policy, moved)


@router.post("/v1/policies/{policy}/rollback")
def roll_back(request: Request, policy: str, document: Annotated[Rollback, Body()]) -> dict[str, Any]:
    """Go back to an older version: what serves alone, or the trainer too."""
    here, policy_id, name = _operator(request, policy)
    reason = _reason("rewind" if document.rewind_trainer else "rollback", name, document.note)
    to, force = document.to, document.force
    with transaction(here.engine) as connection:
        if document.rewind_trainer:
            answer = asdict(rewind(connection, policy_id, to, reason=reason, force=force))
        else:
            moved = pointers.roll_back(connection, policy_id, to, reason=reason, force=force)
            answer = _moved(policy, moved)
    here.pointers.refresh()
    return {"policy": policy, **answer}


@router.post("/v1/policies/{policy}/adapters/{version}/pin")
def pin_version(request: Request, policy: str, version: Number) -> dict[str, Any]:
    """Keep a version's files for good."""
    return _set_pinned(request, policy, version, pinned=True)


@router.delete("/v1/policies/{policy}/adapters/{version}/pin")
def unpin_version(request: Request, policy: str, version: Number) -> dict[str, Any]:
    """Leave a version's files to retention again."""
    return _set_pinned(request, policy, version, pinned=False)


@router.get("/v1/policies/{policy}/pointer-moves")
def list_moves(
    request: Request,
    policy: str,
    cursor: Annotated[int, Query(ge=0, le=NEWEST)] = NEWEST,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> dict[str, Any]:
    """List where `latest` and `promoted` pointed, when and why, newest first."""
    here, policy_id = permitted(request, policy)
    with transaction(here.engine) as connection:
        found = pointers.moves(connection, policy_id, before=cursor, limit=limit)
    return {"moves": found, "next_cursor": found[-1]["id"] if len(found) == limit else None}


@router.get("/v1/policies/{policy}/promotion-checks")
def list_checks(
    request: Request, policy: str, limit: Annotated[int, Query(ge=1, le=500)] = 50
) -> dict[str, Any]:
    """List what gates and hook said of the newest versions of a gated policy."""
    here, policy_id = permitted(request, policy)
    with transaction(here.engine) as connection:
        return {"checks": promotion.verdicts(connection, policy_id, limit=limit)}


def _operator(request: Request, policy: str) -> tuple[Context, int, str]:
    caller = authenticate(request, "ops")
    return context(request), permitted_policy(request, caller, policy).id, caller.name


def _set_pinned(request: Request, policy: str, version: Number, *, pinned: bool) -> dict[str, Any]:
    here, policy_id, _ = _operator(request, policy)
    with transaction(here.engine) as connection:
        pointers.pin(connection, policy_id, version, pinned=pinned)
    here.pointers.refresh()
    return {"policy": policy, "version": version, "pinned": pinned}


def _reason(verb: str, name: str, note: str) -> str:
    return f"{verb} by {name}" + (f": {note}" if note else "")


def _moved(policy: str, moved: Moved) -> dict[str, Any]:
    return {"policy": policy, "before": moved.before, "promoted_version": moved.after}
