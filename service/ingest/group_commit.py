"""Group commit: many waiting callers, one transaction.

A thread takes whatever has queued up while transactions ran and writes it at once, so the cost of
durability is shared by all that wait; further threads, if configured, fill the time in which a commit
waits for the disk, but only with as much as is being committed, and with enough: two that flush one item
each would keep everybody else waiting for both. Bounded by items and bytes: beyond, callers are refused
(503) rather than queued, and memory stays flat. Nobody is answered before the commit.
"""

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from service import telemetry
from service.errors import Unavailable, YoroError
from service.ingest.writer import Item, Outcome, Writer

MAX_ITEMS = 500
"""Items in one transaction, unless one caller brings more."""
MAX_BYTES = 8 << 20
"""Bytes of documents in one transaction, unless one caller brings more."""

WORTH_ITEMS = 8
"""Items that are worth a transaction beside another, whose own cost they share."""
PATIENCE_SECONDS = 0.005
"""How long items wait for company at most while other threads write."""

HELD = 4
"""Bytes that a waiting item holds for each byte that came: as sent, canonical, by message, features."""

Result = list[Outcome] | Exception


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One caller's items and the future that it awaits, of a thread or of an event loop."""

    items: Sequence[Item]
    size: int
    answer: "Future[list[Outcome]] | asyncio.Future[list[Outcome]]"
    loop: asyncio.AbstractEventLoop | None = None


class GroupCommit:
    """A bounded queue before the writer, drained by a few threads."""

    def __init__(
        self,
        writer: Writer,
        *,
        max_items: int,
        max_bytes: int,
        threads: int = 1,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """Start the threads."""
        self._writer, self._patience = writer, patience
        self._max_items, self._max_bytes = max_items, max_bytes
        self._queue: deque[_Waiting] = deque()
        self._items = self._bytes = 0
        self._in_hand: list[int] = []
        """Items of each transaction that runs."""
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._drain, name=f"writer-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, items: Sequence[Item], size: int) -> "Future[list[Outcome]]":
        """Queue items of one caller (they share a transaction). Raises Unavailable when full or closing."""
        answer: Future[list[Outcome]] = Future()
        self._enqueue(_Waiting(items, size, answer))
        return answer

    async def write(self, items: Sequence[Item], size: int) -> list[Outcome]:
        """Queue items and await their commit. Raises Unavailable when full, closing or not committed."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Outcome]] = loop.create_future()
        self._enqueue(_Waiting(items, size, answer, loop))
        return await answer

    def close(self) -> None:
        """Write what is queued, then end the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _enqueue(self, waiting: _Waiting) -> None:
        with self._changed:
            items, size = self._items + len(waiting.items), self._bytes + waiting.size * HELD
            if self._closing or (self._queue and (items > self._max_items or size > self._max_bytes)):
                telemetry.OVERLOADS.inc()
                raise Unavailable("Intake is at its limit", code="overloaded")
            self._queue.append(waiting)
            self._items, self._bytes = items, size
            if len(self._queue) == 1 or self._is_due():
                self._changed.notify()

    def _is_due(self) -> bool:
        """Whether what waits is worth a transaction of its own beside those that run."""
        return self._closing or not self._in_hand or self._items >= max(WORTH_ITEMS, min(self._in_hand))

    def _drain(self) -> None:
        while group := self._next():
            items = [item for waiting in group for item in waiting.items]
            self._write(group, items)
            with self._changed:
                self._in_hand.remove(len(items))

    def _next(self) -> list[_Waiting]:
        """Wait for a group; none: closing, and all is written."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._closing)
                self._changed.wait_for(lambda: not self._queue or self._is_due(), self._patience)
                if self._queue or self._closing:
                    return self._take()

    def _take(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        items = size = 0
        while self._queue:
            waiting = self._queue[0]
            items, size = items + len(waiting.items), size + waiting.size
            if group and (items > MAX_ITEMS or size > MAX_BYTES):
                break
            group.append(self._queue.popleft())
            self._items -= len(waiting.items)
            self._bytes -= waiting.size * HELD
        if group:
            self._in_hand.append(sum(len(waiting.items) for waiting in group))
        telemetry.QUEUE_ITEMS.set(self._items)
        return group

    def _write(self, group: list[_Waiting], items: list[Item]) -> None:
        telemetry.WRITE_ITEMS.observe(len(items))
        try:
            with telemetry.WRITE_SECONDS.time():
                outcomes = self._writer.write(items)
        except YoroError as error:
            _answer(group, [error] * len(group))
        except Exception as error:  # the thread must outlive any defect; callers get it
            telemetry.logger().error("write_failed", exc_info=error)
            _answer(group, [error] * len(group))
        else:
            _answer(group, _shares(group, outcomes))


def _shares(group: list[_Waiting], outcomes: list[Outcome]) -> list[Result]:
    shares: list[Result] = []
    at = 0
    for waiting in group:
        shares.append(outcomes[at : at + len(waiting.items)])
        at += len(waiting.items)
    return shares


def _answer(group: list[_Waiting], results: Sequence[Result]) -> None:
    """Answer threads at once, and each event loop with a single wake-up."""
    loops: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Waiting, Result]]] = defaultdict(list)
    for waiting, result in zip(group, results, strict=True):
        if waiting.loop is None:
            _settle([(waiting, result)])
        else:
            loops[waiting.loop].append((waiting, result))
    for loop, settled in loops.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: Sequence[tuple[_Waiting, Result]]) -> None:
    for waiting, result in settled:
        if waiting.answer.done():  # its client has gone; the items are stored all the same
            continue
        if isinstance(result, Exception):
            waiting.answer.set_exception(result)
        else:
            waiting.answer.set_result(result)
