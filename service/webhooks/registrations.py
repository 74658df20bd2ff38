"""Who wants to hear of what: webhooks of a policy.

Must run inside the caller's transaction. Events themselves are written to the outbox by the database
(migration 0003), in the transaction that makes them true. Invariant: the secret is shown once.
"""

import secrets
from typing import Any, Literal

from sqlalchemy import Connection, text

from service.errors import NotFound

Event = Literal["version.published", "version.promoted", "alert.raised"]

_ADD = text("""
INSERT INTO webhooks (policy_id, url, events, secret) VALUES (:policy, :url, :events, :secret)
RETURNING id, url, events, created_at
""")

# With the last delivery: what a person asks first is whether it works.
_LIST = text("""
SELECT w.id, w.url, w.events, w.created_at, d.event AS last_event, d.delivered_at, d.attempts, d.last_error,
       (SELECT count(*) FROM webhook_deliveries p WHERE p.webhook_id = w.id AND p.due_at IS NOT NULL)
           AS pending
FROM webhooks w
LEFT JOIN LATERAL (SELECT * FROM webhook_deliveries l WHERE l.webhook_id = w.id ORDER BY l.id DESC LIMIT 1)
    AS d ON true
WHERE w.policy_id = :policy ORDER BY w.id
""")

_REMOVE = text("DELETE FROM webhooks WHERE policy_id = :policy AND id = :id RETURNING id")


def add(connection: Connection, policy_id: int, url: str, events: list[Event]) -> dict[str, Any]:
    """Register a webhook; the answer is the only place where its secret stands."""
    secret = f"whsec_{secrets.token_urlsafe(32)}"
    row = connection.execute(
        _ADD, {"policy": policy_id, "url": url, "events": sorted(set(events)), "secret": secret}
    ).one()
    return {
        "id": row.id, "url": row.url, "events": list(row.events),
        "created_at": row.created_at.isoformat(), "secret": secret,
    }  # fmt: skip


def listed(connection: Connection, policy_id: int) -> list[dict[str, Any]]:
    """Return a policy's webhooks and how their last delivery went."""
    return [
        {
            "id": row.id, "url": row.url, "events": list(row.events),
            "created_at": row.created_at.isoformat(), "pending": row.pending, "last_event": row.last_event,
            "last_error": row.last_error or "",
            "last_delivered_at": row.delivered_at and row.delivered_at.isoformat(),
        }
        for row in connection.execute(_LIST, {"policy": policy_id})
    ]  # fmt: skip


def remove(connection: Connection, policy_id: int, webhook: int) -> None:
    """Remove a webhook and what is still to be delivered to it. Raises NotFound."""
    if connection.execute(_REMOVE, {"policy": policy_id, "id": webhook}).one_or_none() is None:
        raise NotFound(f"There is no webhook {webhook}", code="webhook_not_found")
