"""The lease's heartbeat: a thread that the step cannot block.

It only prolongs; whether the lease still holds is decided by the token in each transaction.
"""

import threading
from types import TracebackType
from typing import Self

from sqlalchemy import Engine

from service import telemetry
from service.batches import leases
from service.batches.leases import Activity, Lease
from service.errors import LeaseLost, Unavailable

BEATS_PER_LEASE = 4


class Heartbeat:
    """Prolongs a lease while the block runs, and says what its holder is doing."""

    def __init__(self, engine: Engine, lease: Lease, ttl_seconds: float) -> None:
        """Remember the lease; the thread starts on entering."""
        self._engine, self._lease, self._ttl = engine, lease, ttl_seconds
        self._activity: Activity = "loading"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def say(self, activity: Activity) -> None:
        """Set what the next beat reports."""
        self._activity = activity

    def __enter__(self) -> Self:
        """Start beating."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(self._ttl / BEATS_PER_LEASE):
            try:
                leases.heartbeat(self._engine, self._lease, self._ttl, self._activity)
            except Unavailable as error:
                telemetry.logger().warning("heartbeat_missed", detail=error.detail)
            except LeaseLost:
                return  # the step's next transaction finds out by itself
