"""`/v1/policies/{p}/status`, `/v1/limits`, and the probes of machines: healthz, readyz, metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from service.api.context import authenticate, context, permitted_policy
from service.batches import status
from service.database import migrate
from service.database.engine import transaction
from service.errors import Unavailable

router = APIRouter(tags=["dashboards"])
probes = APIRouter(tags=["probes"])


@router.get("/v1/policies/{policy}/status")
def policy_status(request: Request, policy: str) -> dict[str, Any]:
    """Say what waits for what: counts by gate, the next batch, the trainer, the last step."""
    caller = authenticate(request, "dashboard", "ops", "agent", "grader", "reader")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        return status.policy_status(connection, entry.id)


@router.get("/v1/limits")
def limits(request: Request) -> dict[str, Any]:
    """State every intake limit."""
    return context(request).settings.limits.model_dump()


@probes.get("/healthz")
def healthz() -> dict[str, str]:
    """Answer as long as the process can."""
    return {"status": "ok"}


@probes.get("/readyz")
def readyz(request: Request) -> dict[str, str]:
    """Answer 200 when the database answers and its schema is current."""
    if not migrate.is_current(context(request).engine):
        raise Unavailable("The schema is not at the newest migration: run `yoro migrate`", code="schema")
    return {"status": "ready"}


@probes.get("/metrics")
def metrics() -> Response:
    """Expose Prometheus metrics."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
