"""Group commit: many waiting callers, one transaction.

A thread takes whatever has queued up while the last transaction ran and writes it at once, so the
cost of durability is shared by all that wait. Bounded by items and bytes: beyond, callers are
refused (503) rather than queued, and memory stays flat. Nobody is answered before the commit.
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from service import telemetry
from service.errors import Unavailable, YoroError
from service.ingest.writer import Item, Outcome, Writer

MAX_ITEMS = 500
"""Items in one transaction."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One caller's items and the future that it awaits."""

    items: Sequence[Item]
    size: int
    answer: "Future[list[Outcome]]"


class GroupCommit:
    """A bounded queue before one writer, drained by one thread."""

    def __init__(self, writer: Writer, *, max_items: int, max_bytes: int) -> None:
        """Start the thread."""
        self._writer = writer
        self._max_items, self._max_bytes = max_items, max_bytes
        self._queue: deque[_Waiting] = deque()
        self._items = self._bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._drain, name="writer", daemon=True)
        self._thread.start()

    def submit(self, items: Sequence[Item], size: int) -> "Future[list[Outcome]]":
        """Queue items of one caller (they share a transaction). Raises Unavailable when full or closing."""
        waiting = _Waiting(items, size, Future())
        with self._changed:
            full = self._items + len(items) > self._max_items or self._bytes + size > self._max_bytes
            if self._closing or (full and self._queue):
                telemetry.OVERLOADS.inc()
                raise Unavailable("Intake is at its limit", code="overloaded")
            self._queue.append(waiting)
            self._items += len(items)
            self._bytes += size
            telemetry.QUEUE_ITEMS.set(self._items)
            self._changed.notify()
        return waiting.answer

    def close(self) -> None:
        """Write what is queued, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _drain(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                group = self._take()
            self._write(group)

    def _take(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        taken = 0
        while self._queue and (not group or taken + len(self._queue[0].items) <= MAX_ITEMS):
            waiting = self._queue.popleft()
            group.append(waiting)
            taken += len(waiting.items)
            self._items -= len(waiting.items)
            self._bytes -= waiting.size
        telemetry.QUEUE_ITEMS.set(self._items)
        return group

    def _write(self, group: list[_Waiting]) -> None:
        items = [item for waiting in group for item in waiting.items]
        telemetry.WRITE_ITEMS.observe(len(items))
        try:
            with telemetry.WRITE_SECONDS.time():
                outcomes = self._writer.write(items)
        except YoroError as error:
            self._fail(group, error)
        except Exception as error:  # noqa: BLE001 - the thread must outlive any defect; callers get it
            telemetry.logger().error("write_failed", exc_info=error)
            self._fail(group, error)
        else:
            at = 0
            for waiting in group:
                waiting.answer.set_result(outcomes[at : at + len(waiting.items)])
                at += len(waiting.items)

    def _fail(self, group: list[_Waiting], error: Exception) -> None:
        for waiting in group:
            waiting.answer.set_exception(error)
