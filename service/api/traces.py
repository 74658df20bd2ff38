"""`POST /v1/traces`: the door of the agents."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from service import telemetry
from service.api.bodies import read_json
from service.api.context import authenticate, context, permitted_policy
from service.api.directory import Caller
from service.errors import Forbidden, TooLarge, YoroError
from service.ingest import grades, rollouts
from service.ingest.formats import native
from service.ingest.writer import Item
from service.schemas import GradeAccepted, Trace, TraceAccepted
from service.settings import Limits

router = APIRouter(tags=["agents"])


@router.post("/v1/traces", status_code=201, response_model=TraceAccepted)
async def post_trace(request: Request) -> Response:
    """Store one trace: 201 when durable, 200 for a duplicate, 409 if the id has other content."""
    caller = authenticate(request, "agent")
    here = context(request)
    document, body = await read_json(request, here.settings.limits)
    items = prepare(request, caller, document, body)
    outcomes = await asyncio.wrap_future(here.writes.submit(items, len(body)))
    answer = merged(outcomes)
    telemetry.TRACES.labels(answer.status).inc()
    return durable(answer)


def prepare(request: Request, caller: Caller, document: Any, raw: bytes) -> list[Item]:
    """Validate one trace document; return it and the grade that it carries, ready for the writer."""
    here = context(request)
    trace = native.validate(Trace, document)
    _check_size(trace, len(raw), here.settings.limits)
    policy = permitted_policy(request, caller, trace.policy)
    items: list[Item] = [
        rollouts.prepare(trace, raw, policy_id=policy.id, policy=policy.name, key=here.fingerprint_key)
    ]
    if trace.reward is not None:
        if not caller.has("grader"):
            raise Forbidden("An embedded reward needs the role grader", code="role")
        rule = policy.settings.reward
        items.append(grades.from_trace(trace.reward, trace_id=trace.trace_id, policy_id=policy.id, rule=rule))
    return items


def merged(outcomes: list[Any]) -> TraceAccepted:
    """Return the trace's answer with its embedded grade's warnings. Raises what the writer found."""
    answer, *graded = outcomes
    for outcome in outcomes:
        if isinstance(outcome, YoroError):
            raise outcome
    accepted: TraceAccepted = answer
    for grade in graded:
        if isinstance(grade, GradeAccepted):
            accepted.warnings.extend(grade.warnings)
    return accepted


def durable(answer: TraceAccepted | GradeAccepted) -> Response:
    """Return 201 for what is new, 200 for a duplicate; either way it is in the database."""
    status = 201 if answer.status == "accepted" else 200
    return Response(answer.model_dump_json(), status, media_type="application/json")


def _check_size(trace: Trace, size: int, limits: Limits) -> None:
    tokens = sum(
        len(call.prompt_token_ids or ()) + len(call.completion_token_ids or ()) for call in trace.calls
    )
    for name, found in (
        ("trace_bytes", size),
        ("messages", len(trace.messages)),
        ("tokens", tokens),
    ):
        limit = getattr(limits, name)
        if found > limit:
            raise TooLarge(f"The trace has {found} {name.replace('_', ' ')}, the limit is {limit}", code=name)
