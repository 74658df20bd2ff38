"""The consumer's loop: poll, one transaction, commit of offsets; then the next.

Knows messages and the writer, no client and no SQL. While one batch is in its transaction the next is
read and prepared. Invariants: an offset is committed only after the transaction that stored all before
it, or its dead letter; an outage of the database stops nothing but time: the partitions are paused, the
group is told that we live, and the same batch is tried again; nothing but a stop ends that.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from sqlalchemy import Connection

from service import telemetry
from service.errors import Unavailable, YoroError
from service.ingest import dead_letters
from service.ingest.consumer_lag import LagMeter
from service.ingest.message_reader import Reader, Refusal
from service.ingest.messages import Message, Partition, Reach
from service.ingest.writer import Item, Outcome, Writer
from service.schemas import GradeAccepted, TraceAccepted

POLL_SECONDS = 0.5
BUSY_POLL_SECONDS = 0.05
"""Patience for more messages while a transaction runs."""
ALIVE_SECONDS = 0.2
"""Time between two signs of life while a transaction runs or is waited for."""
LONGEST_PAUSE = 10.0
SWITCH_SECONDS = 0.0005
"""How long the thread that reads may keep the interpreter while the one that writes waits for it; with
Python's 5 ms each hand-over costs as much as twenty messages."""
Became = TraceAccepted | GradeAccepted | Refusal


class Polled(Protocol):
    """What one poll brought."""

    @property
    def messages(self) -> Sequence[Message]:
        """Messages, those of a partition in order."""
        ...

    @property
    def tenures(self) -> Mapping[Partition, int]:
        """Which tenure of each partition they belong to."""
        ...


class Subscription(Protocol):
    """A member of the group (service/ingest/kafka.py)."""

    def poll(self, seconds: float) -> Polled:
        """Wait for messages. Raises Unavailable."""
        ...

    def keep_alive(self) -> None:
        """Stay in the group without taking messages. Raises Unavailable."""
        ...

    def commit_offsets(self, offsets: Mapping[Partition, int], tenures: Mapping[Partition, int]) -> None:
        """Commit offsets of partitions that are still ours. Raises Unavailable."""
        ...

    def reaches(self) -> Mapping[Partition, Reach]:
        """Return how far each of our partitions was read, from memory."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The messages of one transaction, and what became of reading them."""

    messages: Sequence[Message]
    tenures: Mapping[Partition, int]
    prepared: Sequence[Item | Refusal]

    @property
    def offsets(self) -> dict[Partition, int]:
        """Return the next offset of each partition."""
        return {message.partition: message.offset + 1 for message in self.messages}


@dataclass(slots=True)
class Consumer:
    """Consumes until told to stop. `pause` is a seam for tests: how long the n-th retry waits."""

    subscription: Subscription
    reader: Reader
    writer: Writer
    meter: LagMeter
    pause: Callable[[int], float] = lambda attempt: min(LONGEST_PAUSE, 0.1 * 2**attempt)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "consumer-writer"))
    _writing: "tuple[Batch, Future[bool]] | None" = None
    _offsets: dict[Partition, int] = field(default_factory=dict)
    """Stored, and still to be committed."""
    _tenures: dict[Partition, int] = field(default_factory=dict)

    def run(self, stop: threading.Event) -> None:
        """Loop until `stop`, then finish what is in hand and commit it."""
        try:
            while not stop.is_set():
                try:
                    self._turn(stop)
                except Unavailable as error:
                    telemetry.logger().warning("kafka_unavailable", detail=error.detail)
                    stop.wait(1.0)
            self._settle()
            self._commit()
        except Unavailable as error:
            telemetry.logger().warning("offsets_not_committed", detail=error.detail)
        finally:
            stop.set()
            self._pool.shutdown()

    def _turn(self, stop: threading.Event) -> None:
        polled = self.subscription.poll(POLL_SECONDS if self._writing is None else BUSY_POLL_SECONDS)
        self.meter.polled(polled.messages)
        self.meter.tick(self.subscription.reaches)
        if not polled.messages:
            if self._writing is None or self._writing[1].done():
                self._settle()
                self._commit()
            return
        prepared = self._prepare(polled.messages, stop)
        # What follows a batch that was given up must not be stored: its offsets would cover that batch, too.
        if not self._settle() or prepared is None:
            return
        batch = Batch(polled.messages, polled.tenures, prepared)
        self._writing = batch, self._pool.submit(self._store, batch, stop)
        self._commit()

    def _prepare(self, messages: Sequence[Message], stop: threading.Event) -> list[Item | Refusal] | None:
        """Read messages; wait out an outage of what that needs. None: told to stop meanwhile."""
        attempt = 0
        while True:
            try:
                return self.reader.read(messages)
            except Unavailable as error:
                telemetry.logger().warning("messages_wait", detail=error.detail, attempt=attempt)
            if stop.is_set():
                return None
            self._wait(self.pause(attempt), stop)
            attempt += 1

    def _wait(self, seconds: float, stop: threading.Event) -> None:
        """Let time pass as a living member of the group."""
        while seconds > 0 and not stop.wait(min(seconds, ALIVE_SECONDS)):
            seconds -= ALIVE_SECONDS
            self._live()

    def _live(self) -> None:
        try:
            self.subscription.keep_alive()
        except Unavailable as error:
            telemetry.logger().warning("kafka_unavailable", detail=error.detail)
        self.meter.tick(self.subscription.reaches)

    def _settle(self) -> bool:
        """Wait for the transaction in hand, and note what may be committed; False: it was given up."""
        if self._writing is None:
            return True
        batch, done = self._writing
        while not wait([done], ALIVE_SECONDS).done:
            self._live()
        self._writing = None
        if not done.result():
            return False
        self._offsets.update(batch.offsets)
        self._tenures.update(batch.tenures)
        self.meter.stored(batch.messages)
        return True

    def _commit(self) -> None:
        """Commit what is stored. Where that fails it is tried again with what comes next."""
        if self._offsets:
            self.subscription.commit_offsets(self._offsets, self._tenures)
            self._offsets.clear()

    def _store(self, batch: Batch, stop: threading.Event) -> bool:
        """Store a batch, however long the database is away; False: told to stop before it came back."""
        attempt = 0
        while True:
            try:
                with telemetry.CONSUMER_WRITE_SECONDS.time():
                    store(self.writer, self.reader, batch)
            except Exception as error:  # whatever it is, the messages are not to blame
                detail = error.detail if isinstance(error, YoroError) else repr(error)
                telemetry.logger().error(
                    "batch_waits", detail=detail, attempt=attempt, messages=len(batch.messages)
                )
            else:
                return True
            if stop.wait(self.pause(attempt)):
                return False
            attempt += 1


def store(writer: Writer, reader: Reader, batch: Batch) -> list[Became]:
    """Write a batch and its dead letters in one transaction. Raises Unavailable: nothing is known stored."""
    new_letters: list[tuple[str, str]] = []
    became: list[Became] = []

    def add_letters(connection: Connection, outcomes: list[Outcome]) -> None:
        became[:] = reader.became(batch.messages, batch.prepared, outcomes)
        refusals = [refusal for refusal in became if isinstance(refusal, Refusal)]
        new_letters[:] = dead_letters.add(connection, refusals)

    items = [item for item in batch.prepared if not isinstance(item, Refusal)]
    writer.write(items, add_letters)
    _count(batch, became, new_letters)
    return became


def _count(batch: Batch, became: Sequence[Became], new_letters: Sequence[tuple[str, str]]) -> None:
    telemetry.CONSUMER_BATCH.observe(len(batch.messages))
    for message, outcome in zip(batch.messages, became, strict=True):
        if isinstance(outcome, Refusal):
            result = "dead_letter"
        else:
            result = outcome.status
            counter = telemetry.TRACES if isinstance(outcome, TraceAccepted) else telemetry.GRADES
            counter.labels(result).inc()
        telemetry.CONSUMED.labels(message.partition.topic, result).inc()
    for topic, code in new_letters:
        telemetry.DEAD_LETTERS.labels(topic, code).inc()
