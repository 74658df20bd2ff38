"""Batch requests: many documents in, one result each out, in order.

Invariants: a bad item voids no other; the good items of one request share a transaction, so that a
503 means that none of them is known to be stored and the whole request may be repeated.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import orjson
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool

from service import telemetry
from service.api.bodies import JSON, SLOW_BYTES, content_type, read_body
from service.api.context import HttpSender, authenticate_sender, context
from service.api.problems import problem
from service.errors import FieldError, Invalid, TooLarge, YoroError
from service.ingest.formats import jsontext
from service.ingest.writer import Item
from service.schemas import GradeAccepted, TraceAccepted
from service.settings import Limits

Name = Literal["traces", "rewards"]
Prepare = Callable[[Any, bytes, HttpSender], Item]
Prepared = Item | YoroError
_COUNTERS = {"traces": telemetry.TRACES, "rewards": telemetry.GRADES}
_AT_ONCE = 16
"""Items prepared before other requests get their turn."""
_ID = re.compile(r"[A-Za-z0-9._:@-]{1,200}")


async def answer_batch(request: Request, name: Name, prepare: Prepare) -> Response:
    """Read, prepare and store the items of a request; 207 with a result each."""
    sender, bucket = await authenticate_sender(request, "agent" if name == "traces" else "grader")
    here = context(request)
    limits = here.settings.limits
    with here.in_flight.holding() as held:
        kind = content_type(request, many=True)
        body = await read_body(request, limits, held)
        split = _split_json if kind == JSON else _split_lines
        async with here.parsing:
            if len(body) < SLOW_BYTES:
                documents = split(body, name, limits)
            else:
                documents = await run_in_threadpool(split, body, name, limits)
            if bucket is not None:
                bucket.charge(len(documents))
            ids = [_trace_id(document) for document, _ in documents]
            prepared = await _prepare_all(documents, prepare, sender, limits)
            del documents
        size = len(body)
        del body
    outcomes = await _store(request, prepared, size)
    return _answer(name, ids, outcomes)


async def _prepare_all(
    documents: list[tuple[Any, bytes | None]], prepare: Prepare, sender: HttpSender, limits: Limits
) -> list[Prepared]:
    prepared: list[Prepared] = []
    for start in range(0, len(documents), _AT_ONCE):
        prepared += [
            _prepared(*pair, prepare, sender, limits) for pair in documents[start : start + _AT_ONCE]
        ]
        await asyncio.sleep(0)
    return prepared


def _prepared(
    document: Any, raw: bytes | None, prepare: Prepare, sender: HttpSender, limits: Limits
) -> Prepared:
    try:
        if isinstance(document, YoroError):
            return document
        if raw is None:
            raw = jsontext.sent(document, max_depth=limits.json_depth)
        return prepare(document, raw, sender)
    except YoroError as error:
        return error


async def _store(request: Request, prepared: list[Prepared], size: int) -> list[Any]:
    items = [item for item in prepared if not isinstance(item, YoroError)]
    stored = iter(await context(request).writes.write(items, size) if items else [])
    return [item if isinstance(item, YoroError) else next(stored) for item in prepared]


def _split_json(body: bytes, name: Name, limits: Limits) -> list[tuple[Any, bytes | None]]:
    # Two levels are the batch's own; what lies deeper in one item concerns that item.
    parsed = jsontext.parse_many(body, max_depth=limits.json_depth)
    items = parsed.get(name) if isinstance(parsed, dict) and len(parsed) == 1 else parsed
    if not isinstance(items, list):
        message = f"must be an array of {name}, or an object with only that array under {name!r}"
        raise Invalid(message, [FieldError("", message)])
    _check_count(len(items), limits)
    return [(item, None) for item in items]


def _split_lines(body: bytes, name: Name, limits: Limits) -> list[tuple[Any, bytes | None]]:
    lines = [line for line in body.split(b"\n") if line.strip()]
    _check_count(len(lines), limits)
    return [(_parsed(line, limits), line) for line in lines]


def _parsed(line: bytes, limits: Limits) -> Any:
    try:
        return jsontext.parse(line, max_depth=limits.json_depth)
    except YoroError as error:
        return error


def _check_count(count: int, limits: Limits) -> None:
    if count > limits.batch_items:
        raise TooLarge(
            f"The batch has {count} items, the limit is {limits.batch_items}: split it", code="batch_items"
        )


def _trace_id(document: Any) -> str | None:
    """Return an item's id where it is one; what else a client sent is not echoed."""
    found = document.get("trace_id") if isinstance(document, dict) else None
    return found if isinstance(found, str) and _ID.fullmatch(found) else None


def _answer(name: Name, ids: Iterable[str | None], outcomes: list[Any]) -> Response:
    results = []
    for index, (trace_id, outcome) in enumerate(zip(ids, outcomes, strict=True)):
        if isinstance(outcome, TraceAccepted | GradeAccepted):
            _COUNTERS[name].labels(outcome.status).inc()
            results.append({"index": index, **outcome.model_dump()})
        else:
            _COUNTERS[name].labels("refused").inc()
            results.append({"index": index, "trace_id": trace_id, "problem": problem(outcome)})
    return Response(orjson.dumps({"results": results}), 207, media_type="application/json")
