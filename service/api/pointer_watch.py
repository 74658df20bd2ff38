"""Where `latest` and `promoted` point, in memory: polls and long-polls cost the database nothing.

    Postgres ─NOTIFY──> one thread a process: reads all pointers ──> waiting requests whose pointer differs

Knows no HTTP. Invariants: one connection listens, and reads once a second all the same, so that a lost
notice costs a second; a description is rendered once however many ask for it; waiting takes no thread.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping

import orjson
import psycopg
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from service import telemetry
from service.adapters import registry
from service.adapters.registry import Pointed, Pointer, Version
from service.database.engine import transaction
from service.errors import NotFound, Unavailable

RESYNC_SECONDS = 1.0
KEPT = 256
"""Descriptions and versions kept in memory."""
WOKEN_AT_ONCE = 100

Key = tuple[int, Pointer]
_GAUGES = {"latest": telemetry.HEAD_VERSION, "promoted": telemetry.PROMOTED_VERSION}


class PointerWatch:
    """The pointers of every policy, and who waits for them to move."""

    def __init__(self, engine: Engine) -> None:
        """Read once; `start` keeps it fresh."""
        self._engine = engine
        self._stop = threading.Event()
        self._reading = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[Key, set[asyncio.Future[bool]]] = {}
        self._bodies: OrderedDict[tuple[int, str], asyncio.Future[bytes]] = OrderedDict()
        self._versions: OrderedDict[tuple[int, int], Version] = OrderedDict()
        self._pointed: Mapping[Key, Pointed] = {}
        self.refresh()

    def start(self) -> None:
        """Listen in the background until `close`; call it from the event loop that will wait."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="pointers", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()

    def refresh(self) -> None:
        """Read now, and wake whoever waits for what has moved."""
        with self._reading:
            before = self._pointed
            with transaction(self._engine) as connection:
                self._pointed = registry.pointers(connection)
            moved = [key for key, found in self._pointed.items() if before.get(key) != found]
            for key in moved:
                _show(key[1], self._pointed[key])
        if moved and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, moved)

    async def pointed(self, policy_id: int, pointer: Pointer) -> Pointed:
        """Return where a pointer points; only a policy made just now asks the database."""
        found = self._pointed.get((policy_id, pointer))
        if found is None:
            await run_in_threadpool(self.refresh)
            found = self._pointed.get((policy_id, pointer))
        if found is None:
            raise NotFound("There is no such policy", code="policy_not_found")
        return found

    async def other_than(self, policy_id: int, pointer: Pointer, unless: int, seconds: float) -> Pointed:
        """Return where a pointer points as soon as that is not `unless`, or after `seconds` in any case."""
        key, deadline = (policy_id, pointer), asyncio.get_running_loop().time() + seconds
        found = await self.pointed(policy_id, pointer)
        while found.version == unless and await self._moved(key, deadline):
            found = self._pointed.get(key, found)
        return found

    async def description(self, policy_id: int, found: Pointed) -> bytes:
        """Return the JSON of what stands at a pointer; whoever asks meanwhile shares one rendering."""
        key = (policy_id, found.etag)
        rendering = self._bodies.get(key)
        if rendering is None:
            rendering = asyncio.ensure_future(run_in_threadpool(self._render, policy_id, found.version))
            self._bodies[key] = rendering
            if len(self._bodies) > KEPT:
                self._bodies.popitem(last=False)
        try:
            return await asyncio.shield(rendering)
        except Exception:
            self._bodies.pop(key, None)
            raise

    def version(self, policy_id: int, number: int) -> Version:
        """Return a version for the sake of what never changes of it. Raises NotFound."""
        found = self._versions.get((policy_id, number))
        if found is None:
            with transaction(self._engine) as connection:
                found = registry.by_number(connection, policy_id, number)
            self._versions[policy_id, number] = found
            if len(self._versions) > KEPT:
                self._versions.popitem(last=False)
        return found

    def _render(self, policy_id: int, number: int) -> bytes:
        with transaction(self._engine) as connection:
            return orjson.dumps(registry.by_number(connection, policy_id, number).describe())

    async def _moved(self, key: Key, deadline: float) -> bool:
        """Wait until something at this pointer changes; False when the time is up."""
        loop = asyncio.get_running_loop()
        notice: asyncio.Future[bool] = loop.create_future()
        # The timer answers by itself: a loop's timers may be early by a millisecond, so no clock can tell it
        # from a request that ends.
        timer = loop.call_at(deadline, _answer, notice, False)
        waiting = self._waiting.setdefault(key, set())
        waiting.add(notice)
        try:
            return await notice
        finally:
            timer.cancel()
            waiting.discard(notice)

    def _wake(self, moved: list[Key]) -> None:
        self._wake_some([notice for key in moved for notice in self._waiting.pop(key, ())])

    def _wake_some(self, notices: list[asyncio.Future[bool]]) -> None:
        """Wake a few in each turn of the loop: ten thousand at once would keep all other requests waiting."""
        for notice in notices[:WOKEN_AT_ONCE]:
            _answer(notice, True)
        if len(notices) > WOKEN_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._wake_some, notices[WOKEN_AT_ONCE:])

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except (Unavailable, DBAPIError, psycopg.Error) as error:
                if not self._stop.is_set():
                    telemetry.logger().warning("pointers_not_watched", detail=str(error))
                self._stop.wait(RESYNC_SECONDS)

    def _listen(self) -> None:
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("LISTEN yoro_versions"))
            driver = connection.connection.driver_connection
            assert isinstance(driver, psycopg.Connection)  # noqa: S101 - the only driver of database/engine.py
            try:
                while not self._stop.is_set():
                    self.refresh()
                    for _ in driver.notifies(timeout=RESYNC_SECONDS, stop_after=1):
                        pass
            finally:
                connection.invalidate()  # nobody else gets a connection that listens


def _show(pointer: Pointer, found: Pointed) -> None:
    """Export where a pointer points, a rewind or a rollback too: only the database knows, not a trainer."""
    _GAUGES[pointer].labels(found.policy).set(found.version)


def _answer(notice: asyncio.Future[bool], moved: bool) -> None:
    if not notice.done():
        notice.set_result(moved)
