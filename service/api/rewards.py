"""`POST /v1/rewards`: the door of the graders."""

import asyncio

from fastapi import APIRouter, Request, Response

from service import telemetry
from service.api.bodies import read_json
from service.api.context import authenticate, context, permitted_policy
from service.api.traces import durable
from service.errors import YoroError
from service.ingest import grades
from service.ingest.formats import native
from service.schemas import Grade, GradeAccepted

router = APIRouter(tags=["graders"])


@router.post("/v1/rewards", status_code=201, response_model=GradeAccepted)
async def post_reward(request: Request) -> Response:
    """Store one grade: 201 when durable, 200 for a duplicate; its trace may come later."""
    caller = authenticate(request, "grader")
    here = context(request)
    document, body = await read_json(request, here.settings.limits)
    grade = native.validate(Grade, document)
    policy = permitted_policy(request, caller, grade.policy)
    item = grades.prepare(grade, policy_id=policy.id, rule=policy.settings.reward)
    (answer,) = await asyncio.wrap_future(here.writes.submit([item], len(body)))
    if isinstance(answer, YoroError):
        raise answer
    telemetry.GRADES.labels(answer.status).inc()
    return durable(answer)
