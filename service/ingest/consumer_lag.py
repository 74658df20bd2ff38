"""How far the consumer is behind: measured in its loop, told to Prometheus, `readyz` and the database.

Knows no client. Invariants: what is in hand counts as unconsumed until its transaction is committed;
a loop that has stopped turning is not ready, whatever it last measured.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine, text

from service import telemetry
from service.database.engine import transaction
from service.errors import Unavailable
from service.ingest import arrays
from service.ingest.messages import Message, Partition, Reach

TICK_SECONDS = 0.5
REPORT_SECONDS = 5.0
STUCK_SECONDS = 60.0
"""A loop that did not turn for so long is stuck."""
REMEMBERED = timedelta(days=1)
"""How long the last word on a partition stays, if no consumer owns it any more."""

_REPORT = text("""
INSERT INTO consumer_lags (topic, partition, consumer, lag, oldest_at, limit_seconds, reported_at)
SELECT topic, partition, :consumer, lag, oldest_at, :limit, clock_timestamp()
FROM unnest(CAST(:topic AS text[]), CAST(:partition AS integer[]), CAST(:lag AS bigint[]),
            CAST(:oldest_at AS timestamptz[])) AS new (topic, partition, lag, oldest_at)
ORDER BY topic, partition
ON CONFLICT (topic, partition) DO UPDATE SET consumer = excluded.consumer, lag = excluded.lag,
    oldest_at = excluded.oldest_at, limit_seconds = excluded.limit_seconds, reported_at = excluded.reported_at
""")

_FORGET = text("DELETE FROM consumer_lags WHERE reported_at < clock_timestamp() - CAST(:age AS interval)")


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a partition is behind. Example: 12 messages, the oldest produced at noon."""

    messages: int
    oldest_at: datetime | None


class LagMeter:
    """Written by the consumer's thread, read by any."""

    def __init__(self, limit_seconds: float) -> None:
        """Take the age of the oldest message beyond which the consumer is not ready."""
        self.limit_seconds = limit_seconds
        self._lock = threading.Lock()
        self._in_hand: dict[Partition, deque[tuple[int, datetime]]] = {}
        """First offset of each batch in hand, and when that message was produced."""
        self._behind_since: dict[Partition, datetime] = {}
        self._lags: dict[Partition, Lag] = {}
        self._ticked_at = time.monotonic()
        self._measured_at = 0.0

    def polled(self, messages: Sequence[Message]) -> None:
        """Note what is in hand now."""
        firsts: dict[Partition, Message] = {}
        for message in messages:
            firsts.setdefault(message.partition, message)
        with self._lock:
            for partition, message in firsts.items():
                first = (message.offset, message.produced_at or datetime.now(UTC))
                self._in_hand.setdefault(partition, deque()).append(first)

    def stored(self, messages: Sequence[Message]) -> None:
        """Note that a batch is durable."""
        newest = {message.partition: message.produced_at for message in messages}
        with self._lock:
            for partition, produced_at in newest.items():
                if self._in_hand.get(partition):
                    self._in_hand[partition].popleft()
                self._behind_since[partition] = produced_at or datetime.now(UTC)

    def tick(self, reaches: Callable[[], Mapping[Partition, Reach]]) -> None:
        """Measure, twice a second at most."""
        self._ticked_at = now = time.monotonic()
        if now - self._measured_at < TICK_SECONDS:
            return
        self._measured_at = now
        found = reaches()
        with self._lock:
            gone = self._lags.keys() - found.keys()
            self._lags = {partition: self._measured(partition, reach) for partition, reach in found.items()}
            self._in_hand = {known: held for known, held in self._in_hand.items() if known in found}
        self._publish(gone)

    def lags(self) -> dict[Partition, Lag]:
        """Return the last measurement of each partition of ours."""
        with self._lock:
            return dict(self._lags)

    def is_ready(self) -> bool:
        """Tell whether the loop turns and no message has waited for too long."""
        if time.monotonic() - self._ticked_at > STUCK_SECONDS:
            return False
        oldest = [lag.oldest_at for lag in self.lags().values() if lag.oldest_at is not None]
        return not oldest or _age(min(oldest)) <= self.limit_seconds

    def _measured(self, partition: Partition, reach: Reach) -> Lag:
        held = self._in_hand.get(partition)
        durable = held[0][0] if held else reach.position
        messages = max(0, (reach.position if reach.end is None else reach.end) - durable)
        if held:
            return Lag(messages, held[0][1])
        if not messages:
            self._behind_since.pop(partition, None)
            return Lag(0, None)
        # It is not known when the next one was produced, but not before the last one that came.
        return Lag(messages, self._behind_since.setdefault(partition, datetime.now(UTC)))

    def _publish(self, gone: set[Partition]) -> None:
        for partition in gone:
            labels = (partition.topic, str(partition.number))
            telemetry.CONSUMER_LAG.remove(*labels)
            telemetry.CONSUMER_OLDEST.remove(*labels)
        for partition, lag in self.lags().items():
            labels = (partition.topic, str(partition.number))
            telemetry.CONSUMER_LAG.labels(*labels).set(lag.messages)
            telemetry.CONSUMER_OLDEST.labels(*labels).set(_age(lag.oldest_at) if lag.oldest_at else 0.0)


def report(engine: Engine, meter: LagMeter, consumer: str) -> None:
    """Write the last measurement where status and alerts look. Raises Unavailable."""
    lags = sorted(meter.lags().items(), key=lambda item: (item[0].topic, item[0].number))
    with transaction(engine) as connection:
        connection.execute(_FORGET, {"age": REMEMBERED})
        connection.execute(
            _REPORT,
            {
                "consumer": consumer,
                "limit": meter.limit_seconds,
                "topic": arrays.texts(partition.topic for partition, _ in lags),
                "partition": arrays.integers(partition.number for partition, _ in lags),
                "lag": arrays.bigints(lag.messages for _, lag in lags),
                "oldest_at": arrays.moments(lag.oldest_at for _, lag in lags),
            },
        )


def keep_reporting(engine: Engine, meter: LagMeter, consumer: str, stop: threading.Event) -> None:
    """Report every few seconds until `stop`; in a thread of its own, so that no database holds up a poll."""
    while not stop.wait(REPORT_SECONDS):
        try:
            report(engine, meter, consumer)
        except Unavailable as error:
            telemetry.logger().warning("lag_not_reported", detail=error.detail)


def _age(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()
