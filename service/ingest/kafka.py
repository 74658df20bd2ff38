"""The Kafka client: the only module that imports kafka-python.

Knows messages and coordinates, nothing of what messages say. Its neighbours see our own types and
errors only; what the client is told stands in kafka_arguments.py.
Invariant: offsets are committed only of partitions that were ours without a break since the poll.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from service import telemetry
from service.errors import Invalid, Unavailable, YoroError
from service.ingest.kafka_arguments import (
    REQUEST_SECONDS,
    connection_arguments,
    consumer_arguments,
    largest_message,
    milliseconds,
    producer_arguments,
)
from service.ingest.messages import Message, Partition, Reach
from service.settings import KafkaSettings, Limits

try:
    from kafka import (
        ConsumerRebalanceListener,
        KafkaAdminClient,
        KafkaConsumer,
        KafkaProducer,
        OffsetAndMetadata,
        TopicPartition,
    )
    from kafka.errors import CommitFailedError, KafkaConfigurationError, KafkaError, TopicAlreadyExistsError
except ModuleNotFoundError as error:
    raise Unavailable("Kafka needs its client here: pip install 'yoro[kafka]'") from error

CLOSE_SECONDS = 5.0
COMMIT_SECONDS = 5.0
"""A commit of offsets that takes longer is tried again later."""
GLANCE_SECONDS, REST_SECONDS, JOIN_SECONDS = 0.002, 0.04, 0.5
CODEC_ERRORS = (RuntimeError, AssertionError)
"""What kafka-python raises, beside its own errors, for a block that it cannot unpack."""


@dataclass(frozen=True, slots=True)
class Polled:
    """What one poll brought, and the tenure of each partition at that moment."""

    messages: list[Message]
    tenures: Mapping[Partition, int]


class _Tenures(ConsumerRebalanceListener):  # type: ignore[misc] # kafka-python ships no types
    """Counts how often each partition was taken from us. Runs on the heartbeats' loop: counts, no more."""

    def __init__(self) -> None:
        self.ended: dict[Partition, int] = {}
        self._lock = threading.Lock()

    def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        with self._lock:
            for found in revoked:
                partition = _ours(found)
                self.ended[partition] = self.ended.get(partition, 0) + 1

    def on_partitions_lost(self, lost: Iterable[Any]) -> None:
        self.on_partitions_revoked(lost)

    def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        telemetry.logger().info("partitions_assigned", count=len(list(assigned)))


class Subscription:
    """A member of the group. One thread at a time."""

    def __init__(self, settings: KafkaSettings, limits: Limits, topics: Sequence[str]) -> None:
        """Join. Raises Unavailable when no broker answers."""
        self._tenures = _Tenures()
        try:
            self._client = KafkaConsumer(**consumer_arguments(settings, limits))
            self._client.subscribe(list(topics), listener=self._tenures)
        except KafkaError as error:
            raise _failure(error) from error

    def poll(self, seconds: float) -> Polled:
        """Wait for messages. Raises Unavailable where a broker says no."""
        self._each(self._client.resume, self._client.paused())
        records = self._records(seconds)
        messages = [_message(record) for batch in records.values() for record in batch]
        return Polled(messages, {_ours(found): self._tenure(_ours(found)) for found in records})

    def keep_alive(self) -> None:
        """Stay in the group without taking messages: what comes in the meantime is read again later."""
        self._each(self._client.pause, self._client.assignment())
        records = self._poll(self._patience())  # of partitions that were assigned just now
        self._each(lambda found: self._client.seek(found, records[found][0].offset), records)

    def commit_offsets(self, offsets: Mapping[Partition, int], tenures: Mapping[Partition, int]) -> None:
        """Commit the next offsets to read, of partitions that are still ours. Raises Unavailable."""
        assigned = self._client.assignment()
        ours = {
            TopicPartition(partition.topic, partition.number): OffsetAndMetadata(offset, "", -1)
            for partition, offset in offsets.items()
            if self._tenure(partition) == tenures[partition]
        }
        still = {found: offset for found, offset in ours.items() if found in assigned}
        if not still:
            return
        try:
            with telemetry.CONSUMER_COMMIT_SECONDS.time():
                self._client.commit(still, timeout_ms=milliseconds(COMMIT_SECONDS))
        except CommitFailedError as error:  # our tenure ended meanwhile; whoever has it now reads once more
            telemetry.logger().info("offsets_too_late", detail=_words(error))
        except KafkaError as error:
            raise _failure(error) from error

    def reaches(self) -> dict[Partition, Reach]:
        """Return how far each of our partitions was read, from memory."""
        found = {}
        for partition in self._client.assignment():
            state = self._client._subscription.assignment.get(partition)  # noqa: SLF001 - position() may ask the broker
            if state is not None and state.position is not None:
                found[_ours(partition)] = Reach(state.position.offset, state.highwater)
        return found

    def close(self) -> None:
        """Leave the group."""
        try:
            self._client.close(autocommit=False, timeout_ms=milliseconds(CLOSE_SECONDS))
        except KafkaError as error:
            telemetry.logger().warning("group_not_left", detail=str(error))

    def _each(self, act: Callable[[Any], Any], partitions: Iterable[Any]) -> None:
        """Do something with partitions; those that the heartbeats' loop takes away meanwhile are left out."""
        for partition in list(partitions):
            with suppress(KeyError, KafkaError):
                act(partition)

    def _records(self, seconds: float) -> Any:
        """Wait for records at rest: some brokers answer an empty fetch at once, and the client asks again.

        Fetches go on meanwhile, in the client's own thread; what they bring waits for REST_SECONDS at most.
        """
        deadline = time.monotonic() + seconds
        records = self._poll(self._patience())
        while not records and time.monotonic() < deadline:
            time.sleep(REST_SECONDS)
            records = self._poll(self._patience())
        return records

    def _patience(self) -> float:
        """Return how long one poll may take: joining and finding positions need answers to come within it."""
        assigned = self._client.assignment()
        settled = assigned and len(self.reaches()) == len(assigned)
        # A cooperative rebalance leaves us our partitions while it lasts: only the coordinator knows of it.
        joining = self._client._coordinator.need_rejoin()  # noqa: SLF001 - nothing public tells
        return GLANCE_SECONDS if settled and not joining else JOIN_SECONDS

    def _poll(self, seconds: float) -> Any:
        try:
            return self._client.poll(timeout_ms=milliseconds(seconds))
        except (KafkaError, *CODEC_ERRORS) as error:
            raise _failure(error) from error

    def _tenure(self, partition: Partition) -> int:
        return self._tenures.ended.get(partition, 0)


class Publisher:
    """Sends messages and waits until every replica in sync has them."""

    def __init__(self, settings: KafkaSettings, limits: Limits, **more: Any) -> None:
        """Connect. Raises Unavailable when no broker answers. `more` goes to kafka-python."""
        try:
            self._client = KafkaProducer(**(producer_arguments(settings, limits) | more))
        except KafkaError as error:
            raise _failure(error) from error

    def send(self, messages: Sequence[Message]) -> list[str]:
        """Send messages to their topics and return what went wrong with each; empty: it is there.

        A negative partition number leaves the choice to the key. kafka-python knows neither a header
        without a value nor a message of neither key nor value: both become empty ones.
        """
        return [self._result(future) for future in [self._send(message) for message in messages]]

    def close(self) -> None:
        """Close the connections."""
        self._client.close(timeout=CLOSE_SECONDS)

    def _send(self, message: Message) -> Any:
        number = message.partition.number
        value = b"" if message.value is None and message.key is None else message.value
        try:
            return self._client.send(
                message.partition.topic, value=value, key=message.key,
                headers=[(name, content or b"") for name, content in message.headers],
                partition=number if number >= 0 else None,
            )  # fmt: skip
        except (KafkaError, ValueError, TypeError) as error:  # the latter two: what no topic would take
            return error

    def _result(self, future: Any) -> str:
        if isinstance(future, Exception):
            return _words(future)
        try:
            future.get(timeout=REQUEST_SECONDS + 10)
        except KafkaError as error:
            return _words(error)
        return ""


def create_topics(
    settings: KafkaSettings, limits: Limits, topics: Iterable[str], *, partitions: int, replication: int
) -> dict[str, bool]:
    """Create what is missing, and tell of each topic whether it was made now. Raises Unavailable."""
    size = largest_message(limits)
    try:
        admin = KafkaAdminClient(**connection_arguments(settings))
    except KafkaError as error:
        raise _failure(error) from error
    try:
        return {topic: _create(admin, topic, partitions, replication, size) for topic in topics}
    finally:
        admin.close()


def _create(admin: Any, topic: str, partitions: int, replication: int, size: int) -> bool:
    wanted = {
        "num_partitions": partitions,
        "replication_factor": replication,
        "configs": {"max.message.bytes": str(size)},
    }
    try:
        admin.create_topics({topic: wanted})
    except TopicAlreadyExistsError:
        return False
    except KafkaError as error:
        raise _failure(error) from error
    return True


def _message(record: Any) -> Message:
    return Message(
        Partition(record.topic, record.partition), record.offset, record.key, record.value,
        tuple(record.headers), _moment(record.timestamp),
    )  # fmt: skip


def _moment(milliseconds: int | None) -> datetime | None:
    if milliseconds is None or milliseconds < 0:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError):
        return None


def _ours(found: Any) -> Partition:
    return Partition(found.topic, found.partition)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _failure(error: BaseException) -> YoroError:
    """Return our error: what only other settings can mend is no outage."""
    if isinstance(error, KafkaConfigurationError):
        return Invalid(f"Kafka's settings: {_words(error)}", code="kafka_settings")
    return Unavailable(f"Kafka: {_words(error)}", code="kafka_unavailable")
