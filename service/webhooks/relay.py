"""The outbox's relay: signed POSTs, tried again for a day, from any number of processes.

A delivery is claimed by moving its next try ahead, so that nothing is locked while an endpoint thinks;
a relay that dies in between is made up for by that next try: at least once, the same id each time.
Signature: `Yoro-Signature: t=<unix time>,v1=<hex HMAC-SHA256 of "<t>.<body>" under the secret>`.
Invariants: addresses that are not public are refused unless the server's settings name the host, the
address that was checked is the one connected to, redirects are failures, proxies are not used.
"""

import hashlib
import hmac
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import orjson
from sqlalchemy import Engine, text

from service import telemetry
from service.adapters.hooks import HookFailed, public_address
from service.database.engine import transaction
from service.errors import Unavailable

TIMEOUT_SECONDS = 10.0
MOST_ATTEMPTS = 16
"""With delays of 5 s, doubled up to 2 h: about a day."""
INTERVAL_SECONDS = 1.0
KEPT_DAYS = 7

_CLAIM = text("""
WITH due AS (
    SELECT id FROM webhook_deliveries WHERE due_at <= clock_timestamp()
    ORDER BY due_at LIMIT :limit FOR UPDATE SKIP LOCKED
)
UPDATE webhook_deliveries d SET attempts = d.attempts + 1,
    due_at = clock_timestamp() + make_interval(secs => least(7200, 5 * power(2, d.attempts)))
FROM due, webhooks w WHERE d.id = due.id AND w.id = d.webhook_id
RETURNING d.id, d.event, d.payload, d.attempts, d.created_at, w.url, w.secret
""")

_DELIVERED = text("""
UPDATE webhook_deliveries SET delivered_at = clock_timestamp(), due_at = NULL, last_error = '' WHERE id = :id
""")
_FAILED = text("""
UPDATE webhook_deliveries SET last_error = :error, due_at = CASE WHEN :final THEN NULL ELSE due_at END
WHERE id = :id
""")
_FORGET = text("""
DELETE FROM webhook_deliveries
WHERE due_at IS NULL AND created_at < clock_timestamp() - make_interval(days => :days)
""")


class Relay:
    """Delivers what is due until told to stop."""

    def __init__(self, engine: Engine, *, hosts: Sequence[str] = ()) -> None:
        """Take the process's engine; `hosts` need not be public."""
        self._engine, self._hosts = engine, tuple(hosts)
        self._tidied_at = 0.0

    def run(self, stop: threading.Event) -> None:
        """Loop until `stop`; a database that does not answer is waited for."""
        while not stop.is_set():
            try:
                busy = self.tick()
            except Unavailable as error:
                telemetry.logger().warning("database_unavailable", detail=error.detail)
                busy = 0
            if not busy:
                stop.wait(INTERVAL_SECONDS)

    def tick(self, *, limit: int = 10) -> int:
        """Try what is due; return how many deliveries were tried."""
        with transaction(self._engine) as connection:
            if time.monotonic() - self._tidied_at > 3600:
                connection.execute(_FORGET, {"days": KEPT_DAYS})
                self._tidied_at = time.monotonic()
            due = connection.execute(_CLAIM, {"limit": limit}).all()
        for delivery in due:
            self._deliver(delivery)
        return len(due)

    def _deliver(self, delivery: Any) -> None:
        error = send(delivery.url, delivery.secret, envelope(delivery), self._hosts)
        with transaction(self._engine) as connection:
            if not error:
                connection.execute(_DELIVERED, {"id": delivery.id})
                return
            final = delivery.attempts >= MOST_ATTEMPTS
            connection.execute(_FAILED, {"id": delivery.id, "error": error[:500], "final": final})
        log = telemetry.logger()
        log.warning(
            "webhook_failed", webhook=delivery.url, attempt=delivery.attempts, error=error, final=final
        )


def envelope(delivery: Any) -> bytes:
    """Return the body; `id` is the same at every try, so that a receiver can tell repetitions."""
    return orjson.dumps(
        {
            "id": delivery.id, "event": delivery.event, "created_at": delivery.created_at.isoformat(),
            "data": delivery.payload,
        }
    )  # fmt: skip


def signature(secret: str, moment: int, body: bytes) -> str:
    """Return the value of the header `Yoro-Signature`."""
    digest = hmac.new(secret.encode(), b"%d.%s" % (moment, body), hashlib.sha256).hexdigest()
    return f"t={moment},v1={digest}"


def send(url: str, secret: str, body: bytes, hosts: Sequence[str]) -> str:
    """Post a signed body; return what went wrong, empty for a 2xx answer."""
    try:
        parts = httpx.URL(url)
        address = public_address(parts.host, parts.port or (443 if parts.scheme == "https" else 80), hosts)
        headers = {
            "Host": parts.netloc.decode(), "Content-Type": "application/json",
            "Yoro-Signature": signature(secret, int(time.time()), body),
        }  # fmt: skip
        with httpx.Client(trust_env=False, follow_redirects=False, timeout=TIMEOUT_SECONDS) as client:
            request = client.build_request(
                "POST", parts.copy_with(host=address), content=body, headers=headers,
                extensions={
                    "sni_hostname": parts.host, "timeout": httpx.Timeout(TIMEOUT_SECONDS).as_dict(),
                },
            )  # fmt: skip
            # The status line says it all: a body, however long, is not read.
            reply = client.send(request, stream=True)
            reply.close()
    except (HookFailed, httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return "" if reply.is_success else f"the endpoint answered {reply.status_code}"
