"""The loop: a database that is slow or away, partitions that are taken away, a broken dead-letter topic."""

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from kafka import KafkaConsumer, TopicPartition
from sqlalchemy import Engine, text

from service.api.directory import Directory
from service.database.engine import transaction
from service.errors import Invalid, Unavailable
from service.ingest.consumer_lag import LagMeter
from service.ingest.consuming import Consumer
from service.ingest.dead_letter_relay import LetterRelay
from service.ingest.intake import Intake
from service.ingest.kafka import Polled, Publisher, Subscription
from service.ingest.message_reader import Reader
from service.ingest.messages import Message, Partition, Reach, topics_of
from service.ingest.writer import Writer
from service.settings import KafkaSettings
from tests.conftest import MakePolicy
from tests.databases import unreachable
from tests.documents import trace
from tests.service.ingest.kafka_door import brokers
from tests.service.ingest.kafka_door.conftest import LIMITS, Door, await_that

one_broker = pytest.mark.parametrize("broker", brokers.KINDS[:1], indirect=True)
"""What only our side decides is tested against one of them."""


def committed(door: Door) -> int:
    """Return how many messages of the topic of traces the group has committed."""
    with KafkaConsumer(
        bootstrap_servers=door.settings.bootstrap, group_id=door.settings.group, enable_auto_commit=False
    ) as reader:
        partitions = [TopicPartition(door.traces, number) for number in range(4)]
        return sum(reader.committed(partition) or 0 for partition in partitions)


@one_broker
def test_a_database_slower_than_the_poll_interval_costs_neither_membership_nor_order(
    door: Door, make_policy: MakePolicy
) -> None:
    make_policy()
    door.settings = door.settings.model_copy(update={"poll_interval_seconds": 2.0})
    door.send(door.traces, *(trace() for _ in range(10)))
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(60)

    with door.consuming() as consumer:
        tenures = consumer.subscription._tenures.ended  # type: ignore[attr-defined]
        await_that(lambda: bool(consumer.meter.lags()))
        before = dict(tenures)
        consumer.writer = Writer(door.engine, hold)
        door.send(door.traces, *(trace() for _ in range(10)))
        assert reached.wait(30)
        threading.Event().wait(4.0)  # twice the interval: only time itself can show it
        assert door.count("rollouts") <= 10, "the second ten are held at the barrier"
        assert dict(tenures) == before, "nothing was taken from us"
        go_on.set()
        await_that(lambda: door.count("rollouts") == 20)
    assert committed(door) == 20


@one_broker
def test_an_outage_of_the_database_is_waited_out_and_makes_no_dead_letter(
    door: Door, make_policy: MakePolicy
) -> None:
    make_policy()
    attempts: list[int] = []

    def pause(attempt: int) -> float:
        attempts.append(attempt)
        return 0.05

    with door.consuming(pause=pause) as consumer:
        await_that(lambda: bool(consumer.meter.lags()))
        with unreachable(door.database_url):
            door.send(door.traces, *(trace() for _ in range(10)), b"{")
            await_that(lambda: len(attempts) > 3)
        await_that(lambda: door.count("rollouts") == 10 and len(door.letters()) == 1)
    assert committed(door) == 11


@one_broker
def test_a_stop_during_an_outage_commits_nothing_and_loses_nothing(
    door: Door, make_policy: MakePolicy
) -> None:
    make_policy()
    attempts: list[int] = []
    with outage_later(door) as begin:
        with door.consuming(pause=lambda attempt: attempts.append(attempt) or 0.05) as consumer:
            await_that(lambda: bool(consumer.meter.lags()))
            begin()
            door.send(door.traces, *(trace() for _ in range(10)))
            await_that(lambda: len(attempts) > 1)
        assert committed(door) == 0
    with door.consuming():
        await_that(lambda: door.count("rollouts") == 10)


@contextmanager
def outage_later(door: Door) -> Iterator[Callable[[], Any]]:
    """An outage that begins when asked for, and ends with the block."""
    running = unreachable(door.database_url)
    yield running.__enter__
    running.__exit__(None, None, None)


@one_broker
def test_offsets_of_a_partition_that_was_lost_are_not_committed_even_if_it_came_back(
    door: Door, make_policy: MakePolicy
) -> None:
    make_policy()
    door.send(door.traces, *(trace() for _ in range(10)))
    first = door.subscription()
    polled: list[Any] = []
    await_that(lambda: bool(polled.extend(first.poll(0.2).messages) or len(polled) >= 10))
    offsets = {message.partition: message.offset + 1 for message in polled}
    tenures = {partition: first._tenure(partition) for partition in offsets}

    second = door.subscription()  # its coming ends our tenure of every partition, its going begins another
    with polling(second):
        await_that(lambda: bool(first.poll(0.1) and second._client.assignment() and len(first.reaches()) < 8))
    second.close()
    await_that(lambda: bool(first.poll(0.1) and len(first.reaches()) == 8))
    first.commit_offsets(offsets, tenures)
    assert committed(door) == 0
    first.commit_offsets(offsets, {partition: first._tenure(partition) for partition in offsets})
    assert committed(door) == 10
    first.close()


@contextmanager
def polling(subscription: Subscription) -> Iterator[None]:
    """Poll from a thread while the block runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            subscription.poll(0.1)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    stop.set()
    thread.join()


@one_broker
def test_a_dead_letter_topic_that_takes_nothing_holds_up_no_partition(
    door: Door, make_policy: MakePolicy
) -> None:
    make_policy()
    door.send(door.traces, b"{", trace())
    with door.consuming():
        await_that(lambda: door.count("rollouts") == 1 and len(door.letters()) == 1)
    relay = LetterRelay(
        door.engine,
        lambda: Publisher(door.settings, LIMITS, max_block_ms=500),
        {},
        default="no/where",
        keep_days=30,
    )
    assert (relay.tick(), relay.tick()) == (1, 0)
    (letter,) = door.letters()
    assert letter.due_at is not None
    assert letter.last_error
    with pytest.raises(Invalid, match="Kafka's settings"):
        door.publisher(linger_ms=100_000)


@one_broker
def test_a_letter_of_neither_key_nor_value_and_one_of_a_header_without_a_value_are_relayed(
    door: Door, make_policy: MakePolicy
) -> None:
    make_policy(masking={"patterns": [{"pattern": "secret"}]})
    door.send(door.traces, b"{secret", foreign=b"")
    with door.consuming():
        await_that(lambda: len(door.letters()) == 1)
    relay = LetterRelay(
        door.engine, lambda: Publisher(door.settings, LIMITS), topics_of(door.settings),
        default="nowhere", keep_days=30,
    )  # fmt: skip
    assert relay.tick() == 1
    (letter,) = door.letters()
    assert (letter.kept, letter.message_key, letter.value, letter.due_at) == ("hash", None, None, None)


@one_broker
def test_what_is_older_than_its_time_is_forgotten(door: Door, make_policy: MakePolicy) -> None:
    make_policy()
    door.send(door.traces, b"{")
    with door.consuming():
        await_that(lambda: len(door.letters()) == 1)
    relay = LetterRelay(
        door.engine, lambda: Publisher(door.settings, LIMITS), topics_of(door.settings),
        default="nowhere", keep_days=0,
    )  # fmt: skip
    assert (relay.tick(), relay.tick()) == (1, 0)
    assert door.letters() == []


@one_broker
def test_consume_serves_its_probes_and_topics_create_leaves_what_is_there(
    door: Door, make_policy: MakePolicy
) -> None:
    make_policy()
    environment = os.environ | door.environment()
    made = subprocess.run(
        [sys.executable, "-m", "yoro", "topics", "create", "--replication", "1"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert made.stdout.splitlines().count(f"{door.traces}: was there already") == 1
    door.send(door.traces, trace())
    process = door.process()
    await_that(lambda: door.count("rollouts") == 1)
    assert httpx.get(f"{process.url}/readyz").status_code == 200
    line = f'yoro_consumed_total{{result="accepted",topic="{door.traces}"}} 1.0'
    await_that(lambda: line in httpx.get(f"{process.url}/metrics").text)
    assert process.terminate() == 0
    assert committed(door) == 1


@dataclass
class Script:
    """A subscription that brings what is written, then nothing: no broker is needed to count commits."""

    polls: list[Polled]
    committed: list[Any] = field(default_factory=list)

    def poll(self, seconds: float) -> Polled:
        return self.polls.pop(0) if self.polls else Polled([], {})

    def keep_alive(self) -> None: ...

    def commit_offsets(self, offsets: Any, tenures: Any) -> None:
        self.committed.append(dict(offsets))

    def reaches(self) -> dict[Partition, Reach]:
        return {}


@pytest.mark.parametrize("given_up", [1, 2])
def test_what_follows_a_batch_that_was_given_up_is_not_committed_over_it(
    given_up: int, engine: Engine, make_policy: MakePolicy
) -> None:
    """Of three batches one meets a dying database as we are told to stop; the next would find it well."""
    make_policy()
    settings, here, stop = KafkaSettings(), Partition("yoro.traces", 0), threading.Event()
    bodies = [json.dumps(trace()).encode() for _ in range(3)]
    polls = [Polled([Message(here, offset, None, body)], {here: 0}) for offset, body in enumerate(bodies)]
    transactions = itertools.count(1)

    def die() -> None:
        if next(transactions) == given_up:
            stop.set()
            raise Unavailable

    script = Script(polls)
    reader = Reader(Intake(LIMITS, b"k" * 32), Directory(engine), topics_of(settings))
    Consumer(script, reader, Writer(engine, die), LagMeter(60)).run(stop)
    with transaction(engine) as connection:
        stored = connection.execute(text("SELECT count(*) FROM rollouts")).scalar_one()
    assert stored == given_up - 1
    assert script.committed == [{here: offset} for offset in range(1, given_up)]
