"""`/v1/dead-letters`: Kafka messages that could not be taken; list, show, replay.

They may be of any policy or of none, so a key must not be scoped. What they hold is for `reader`.
"""

import base64
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from service.api.context import authenticate, context
from service.database.engine import transaction
from service.errors import FieldError, Forbidden, Invalid, NotFound
from service.ingest import dead_letters, replaying
from service.ingest.message_reader import Reader
from service.ingest.messages import topics_of
from service.ingest.writer import Writer
from service.keys import Role
from service.schemas import Wire

router = APIRouter(tags=["ops"])
REPLAYED_AT_ONCE = 100
_Id = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Replay(Wire):
    """Which letters to take in again: these, or all open ones of a code. `after` continues."""

    ids: Annotated[list[_Id], Field(min_length=1, max_length=1000)] | None = None
    code: Annotated[str, Field(max_length=100, pattern=r"^[a-z0-9_]+$")] | None = None
    after: _Id = 0


@router.get("/v1/dead-letters")
def list_dead_letters(
    request: Request,
    *,
    code: Annotated[str | None, Query(max_length=100, pattern=r"^[a-z0-9_]+$")] = None,
    is_open: Annotated[bool, Query(alias="open")] = True,
    cursor: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> dict[str, Any]:
    """List letters, newest first, without their content; `open`: only those not replayed yet."""
    _authenticate(request, "ops")
    with transaction(context(request).engine) as connection:
        rows = dead_letters.listed(connection, before=cursor, code=code, is_open=is_open, limit=limit + 1)
    shown = [_document(row) for row in rows[:limit]]
    return {"dead_letters": shown, "next_cursor": shown[-1]["id"] if len(rows) > limit else None}


@router.get("/v1/dead-letters/{letter}")
def show_dead_letter(request: Request, letter: int) -> dict[str, Any]:
    """Show one letter with its key and value: as text where they are UTF-8, else in base64."""
    _authenticate(request, "reader")
    with transaction(context(request).engine) as connection:
        row = dead_letters.found(connection, letter) if 0 <= letter < 2**63 else None
    if row is None:
        raise NotFound(f"There is no dead letter {letter}", code="dead_letter_not_found")
    return {**_document(row), "key": _shown(row.message_key), "value": _shown(row.value)}


@router.post("/v1/dead-letters/replay")
def replay_dead_letters(request: Request, document: Replay) -> dict[str, Any]:
    """Take letters in again; what is refused once more stays, with the new reason."""
    _authenticate(request, "ops")
    if (document.ids is None) == (document.code is None):
        raise Invalid("", [FieldError("/ids", "give either `ids` or `code`")])
    here = context(request)
    reader = Reader(here.intake, here.directory, topics_of(here.settings.kafka))
    with transaction(here.engine) as connection:
        letters = dead_letters.replayable(
            connection, ids=document.ids, code=document.code, after=document.after, limit=REPLAYED_AT_ONCE
        )
    results = replaying.replay(Writer(here.engine), reader, letters)
    more = len(letters) == REPLAYED_AT_ONCE
    return {"results": [asdict(result) for result in results], "next_after": letters[-1][0] if more else None}


def _authenticate(request: Request, role: Role) -> None:
    if authenticate(request, role).policies is not None:
        raise Forbidden("Dead letters may be of any policy: this key is scoped to some", code="policy")


def _document(row: Any) -> dict[str, Any]:
    return {
        "id": row.id, "topic": row.topic, "partition": row.partition, "offset": row.message_offset,
        "code": row.code, "detail": row.detail, "trace_id": row.trace_id, "kept": row.kept, "bytes": row.size,
        "produced_at": row.produced_at and row.produced_at.isoformat(),
        "created_at": row.created_at.isoformat(), "headers": [name for name, _ in row.headers],
        "relayed": row.due_at is None, "relay_attempts": row.attempts, "relay_error": row.last_error,
        "replayed_at": row.replayed_at and row.replayed_at.isoformat(),
    }  # fmt: skip


def _shown(stored: bytes | None) -> dict[str, str] | None:
    if stored is None:
        return None
    try:
        return {"text": bytes(stored).decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(stored).decode()}
