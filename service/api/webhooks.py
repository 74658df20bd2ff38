"""`/v1/policies/{p}/webhooks`: who is told of versions and alerts."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from service.api.context import authenticate, context, permitted_policy
from service.database.engine import transaction
from service.schemas import Wire
from service.webhooks import registrations
from service.webhooks.registrations import Event

router = APIRouter(tags=["ops"])


class NewWebhook(Wire):
    """An endpoint and the events that it wants."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@]+(?:[/?][^\s#]*)?$", max_length=2000)]
    events: list[Event] = Field(min_length=1)


@router.post("/v1/policies/{policy}/webhooks", status_code=201)
def add_webhook(request: Request, policy: str, document: NewWebhook) -> dict[str, Any]:
    """Register a webhook; its signing secret stands in this answer alone."""
    caller = authenticate(request, "ops")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        return registrations.add(connection, entry.id, document.url, document.events)


@router.get("/v1/policies/{policy}/webhooks")
def list_webhooks(request: Request, policy: str) -> dict[str, Any]:
    """List webhooks and how their last delivery went."""
    caller = authenticate(request, "ops")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        return {"webhooks": registrations.listed(connection, entry.id)}


@router.delete("/v1/policies/{policy}/webhooks/{webhook}")
def remove_webhook(request: Request, policy: str, webhook: int) -> dict[str, Any]:
    """Remove a webhook."""
    caller = authenticate(request, "ops")
    entry = permitted_policy(request, caller, policy)
    with transaction(context(request).engine) as connection:
        registrations.remove(connection, entry.id, webhook)
    return {"id": webhook, "status": "removed"}
