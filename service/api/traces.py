"""`POST /v1/traces` and `/v1/traces/batch`: the door of the agents."""

from fastapi import APIRouter, Request, Response

from service import telemetry
from service.api.batches import answer_batch
from service.api.bodies import read_json
from service.api.context import authenticate_sender, context
from service.api.direct import DirectRoute
from service.errors import YoroError
from service.schemas import GradeAccepted, TraceAccepted, TraceResult

router = APIRouter(tags=["agents"], route_class=DirectRoute)


@router.post("/v1/traces", status_code=201, response_model=TraceAccepted)
async def post_trace(request: Request) -> Response:
    """Store one trace: 201 when durable, 200 for a duplicate, 409 if the id has other content."""
    sender, bucket = await authenticate_sender(request, "agent")
    here = context(request)
    with here.in_flight.holding() as held:
        document, body = await read_json(request, here.settings.limits, held)
        if bucket is not None:
            bucket.charge(1)
        item = here.intake.trace(document, body, sender)
        del document
    (answer,) = await here.writes.write([item], len(body))
    if not isinstance(answer, TraceAccepted):
        raise answer if isinstance(answer, YoroError) else YoroError()
    telemetry.TRACES.labels(answer.status).inc()
    return durable(answer)


@router.post("/v1/traces/batch", status_code=207, response_model=dict[str, list[TraceResult]])
async def post_traces(request: Request) -> Response:
    """Store many traces, a JSON array or NDJSON: one result each, in order; a bad one voids no other."""
    return await answer_batch(request, "traces", context(request).intake.trace)


def durable(answer: TraceAccepted | GradeAccepted) -> Response:
    """Return 201 for what is new, 200 for a duplicate; either way it is in the database."""
    code = 201 if answer.status == "accepted" else 200
    return Response(answer.model_dump_json(), code, media_type="application/json")
