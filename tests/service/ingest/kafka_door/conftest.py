"""Brokers, one of each kind a run; a pair of fresh topics a test; real consumers over both."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from service.api.directory import Directory
from service.database.engine import transaction
from service.database.secrets import fingerprint_key
from service.ingest.consumer_lag import LagMeter
from service.ingest.consuming import Consumer
from service.ingest.intake import Intake
from service.ingest.kafka import Publisher, Subscription, create_topics
from service.ingest.message_reader import Reader
from service.ingest.messages import Message, Partition, topics_of
from service.ingest.writer import Writer
from service.settings import KafkaSettings, Limits
from tests.service.ingest.kafka_door import brokers
from tests.service.ingest.kafka_door.brokers import Broker
from yoro.ports import free_port

LIMITS = Limits()
PARTITIONS = 4
SESSION_SECONDS = 6.0


@pytest.fixture(scope="session")
def _brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Broker]]:
    running: dict[str, Broker] = {}
    yield running
    for kind, broker in running.items():
        if kind != "given":
            broker.stop()


@pytest.fixture(params=brokers.KINDS)
def broker(
    request: pytest.FixtureRequest, _brokers: dict[str, Broker], tmp_path_factory: pytest.TempPathFactory
) -> Broker:
    """Each kind of broker in turn, started once a run."""
    kind = request.param
    if kind not in _brokers:
        _brokers[kind] = brokers.started(kind, tmp_path_factory.mktemp("broker"))
    return _brokers[kind]


@dataclass(frozen=True)
class Process:
    """A running `yoro consume`."""

    popen: "subprocess.Popen[bytes]"
    url: str

    def is_up(self) -> bool:
        """Whether it answers, and so listens to signals."""
        try:
            return httpx.get(f"{self.url}/healthz", timeout=1.0).is_success
        except httpx.TransportError:
            return False

    def partitions(self) -> int:
        """How many partitions it owns."""
        return (
            httpx.get(f"{self.url}/metrics").text.count("yoro_consumer_lag_messages{") if self.is_up() else 0
        )

    def terminate(self) -> int:
        """Ask it to go, once it is there, and wait until it is gone."""
        await_that(self.is_up)
        self.popen.terminate()
        return self.popen.wait(30)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(30)


@dataclass
class Door:
    """Fresh topics on a broker, and whoever sends to them or consumes from them."""

    broker: Broker
    engine: Engine
    database_url: str
    settings: KafkaSettings
    _publishers: list[Publisher] = field(default_factory=list)
    _processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def traces(self) -> str:
        return self.settings.traces_topic

    @property
    def rewards(self) -> str:
        return self.settings.rewards_topic

    def publisher(self, **more: Any) -> Publisher:
        made = Publisher(self.settings, LIMITS, **more)
        self._publishers.append(made)
        return made

    def send(self, topic: str, *values: Any, **headers: bytes) -> None:
        """Send documents, or bytes as they are, or None for a tombstone."""
        messages = [message(topic, value, headers) for value in values]
        assert self.publisher().send(messages) == [""] * len(messages)

    def subscription(self) -> Subscription:
        return Subscription(self.settings, LIMITS, list(topics_of(self.settings)))

    def consumer(self, subscription: Subscription, directory: Directory, **more: Any) -> Consumer:
        intake = Intake(LIMITS, fingerprint_key(self.engine))
        reader = Reader(intake, directory, topics_of(self.settings))
        return Consumer(
            subscription, reader, Writer(self.engine), LagMeter(self.settings.oldest_seconds), **more
        )

    @contextmanager
    def consuming(self, **more: Any) -> Iterator[Consumer]:
        """Consume from a thread while the block runs; then stop as SIGTERM would."""
        directory, stop = Directory(self.engine), threading.Event()
        subscription = self.subscription()
        consumer = self.consumer(subscription, directory, **more)
        directory.start()
        thread = threading.Thread(target=consumer.run, args=(stop,))
        thread.start()
        try:
            yield consumer
        finally:
            stop.set()
            thread.join()
            subscription.close()
            directory.close()

    def process(self) -> "Process":
        """Start `yoro consume`."""
        port, environment = free_port(), os.environ | self.environment()
        command = [sys.executable, "-m", "yoro", "consume", "--metrics-port", str(port)]
        started = Process(subprocess.Popen(command, env=environment), f"http://127.0.0.1:{port}")
        self._processes.append(started.popen)
        return started

    def environment(self) -> dict[str, str]:
        kafka = self.settings
        return {
            "YORO_DATABASE_URL": self.database_url, "YORO_KAFKA_BOOTSTRAP": kafka.bootstrap,
            "YORO_KAFKA_GROUP": kafka.group, "YORO_KAFKA_TRACES_TOPIC": kafka.traces_topic,
            "YORO_KAFKA_REWARDS_TOPIC": kafka.rewards_topic,
            "YORO_KAFKA_DEAD_LETTER_TOPIC": kafka.dead_letter_topic,
            "YORO_KAFKA_SESSION_SECONDS": str(kafka.session_seconds),
            "YORO_KAFKA_PREFIXES": json.dumps(kafka.prefixes), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def count(self, table: str) -> int:
        with transaction(self.engine) as connection:
            return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())  # noqa: S608

    def letters(self) -> list[Any]:
        with transaction(self.engine) as connection:
            return list(
                connection.execute(
                    text("SELECT * FROM dead_letters ORDER BY topic, partition, message_offset")
                )
            )

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(30)


def message(topic: str, value: Any, headers: Mapping[str, bytes] | None = None) -> Message:
    """A message whose key is the trace's id."""
    named = value.get("trace_id") if isinstance(value, dict) else None
    body = json.dumps(value).encode() if isinstance(value, dict | list) else value
    key = named.encode() if isinstance(named, str) else b"nobody knows"
    return Message(Partition(topic, -1), 0, key, body, tuple((headers or {}).items()))


def await_that(holds: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


@pytest.fixture
def door(broker: Broker, engine: Engine, database_url: str) -> Iterator[Door]:
    """Fresh topics on each broker."""
    prefix = brokers.fresh_prefix()
    settings = KafkaSettings(
        bootstrap=broker.bootstrap, group=f"{prefix}group", traces_topic=f"{prefix}traces",
        rewards_topic=f"{prefix}rewards", dead_letter_topic=f"{prefix}dead-letter",
        session_seconds=SESSION_SECONDS,
    )  # fmt: skip
    names = [settings.traces_topic, settings.rewards_topic, settings.dead_letter_topic]
    create_topics(settings, LIMITS, names, partitions=PARTITIONS, replication=1)
    made = Door(broker, engine, database_url, settings)
    yield made
    made.close()
