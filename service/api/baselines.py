"""`GET /v1/policies/{p}/baselines`: how every estimator would have served this policy's own batches."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from service.api.context import authenticate, context, permitted_policy
from service.baselines.effective_batch import REFERENCE
from service.batches import bakeoff
from service.database.engine import transaction

router = APIRouter(tags=["dashboards"])


@router.get("/v1/policies/{policy}/baselines")
def compare_baselines(
    request: Request, policy: str, batches: Annotated[int, Query(ge=1, le=2000)] = 200
) -> dict[str, Any]:
    """Compare estimators over the last batches: B_eff as a ratio to the batch mean, with intervals."""
    caller = authenticate(request, "dashboard", "ops", "reader")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        found = bakeoff.compare(connection, entry.id, batches=batches)
        return {
            "policy": policy,
            "reference": REFERENCE,
            "in_use": bakeoff.in_use(connection, entry.id),
            "baselines": [asdict(each) for each in found],
        }
