"""`POST /v1/rewards` and `/v1/rewards/batch`: the door of the graders."""

from fastapi import APIRouter, Request, Response

from service import telemetry
from service.api.batches import answer_batch
from service.api.bodies import read_json
from service.api.context import authenticate_sender, context
from service.api.direct import DirectRoute
from service.api.traces import durable
from service.errors import YoroError
from service.schemas import GradeAccepted, GradeResult

router = APIRouter(tags=["graders"], route_class=DirectRoute)


@router.post("/v1/rewards", status_code=201, response_model=GradeAccepted)
async def post_reward(request: Request) -> Response:
    """Store one grade: 201 when durable, 200 for a duplicate; its trace may come later."""
    sender, bucket = await authenticate_sender(request, "grader")
    here = context(request)
    with here.in_flight.holding() as held:
        document, body = await read_json(request, here.settings.limits, held)
        if bucket is not None:
            bucket.charge(1)
        item = here.intake.grade(document, body, sender)
    (answer,) = await here.writes.write([item], len(body))
    if not isinstance(answer, GradeAccepted):
        raise answer if isinstance(answer, YoroError) else YoroError()
    telemetry.GRADES.labels(answer.status).inc()
    return durable(answer)


@router.post("/v1/rewards/batch", status_code=207, response_model=dict[str, list[GradeResult]])
async def post_rewards(request: Request) -> Response:
    """Store many grades, a JSON array or NDJSON: one result each, in order; a bad one voids no other."""
    return await answer_batch(request, "rewards", context(request).intake.grade)
