"""`yoro consume` and `yoro topics create`: the Kafka door."""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from yoro.cli.processes import Lifeline, MetricsPort, probes, start

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from service.api.directory import Directory
    from service.ingest.consumer_lag import LagMeter
    from service.ingest.kafka import Subscription
    from service.settings import Settings

topics = typer.Typer(help="Kafka topics.", no_args_is_help=True)
JOIN_PAUSE_SECONDS = 2.0


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command()(consume)
    app.add_typer(topics, name="topics")


def consume(lifeline: Lifeline = -1, metrics_port: MetricsPort = 0) -> None:
    """Take traces and grades from Kafka; any number may run, in one group."""
    from service.api.directory import Directory
    from service.database import engine as database
    from service.ingest.consumer_lag import LagMeter
    from service.ingest.consuming import SWITCH_SECONDS
    from service.ingest.masking import load_functions
    from service.settings import Settings

    settings, stop = Settings(), start("consumer", lifeline)
    sys.setswitchinterval(SWITCH_SECONDS)
    engine = database.connect(settings.database_url, name="consumer", by_key=True)
    directory = Directory(engine, load_functions(settings.mask_functions))
    directory.start()
    meter = LagMeter(settings.kafka.oldest_seconds)
    probes(metrics_port, engine, meter.is_ready)
    with _disposing(engine), closing(directory), _beside(_companions(settings, engine, meter, stop), stop):
        _take(settings, engine, directory, meter, stop)


@topics.command()
def create(
    partitions: Annotated[
        int, typer.Option(min=1, help="Of each topic: as many consumers may share it.")
    ] = 6,
    replication: Annotated[
        int, typer.Option(help="Copies of each partition; -1: the broker's default.")
    ] = -1,
) -> None:
    """Create the topics that are missing: traces, rewards and dead letters, of every prefix."""
    from service.ingest.kafka import create_topics
    from service.ingest.messages import all_topics
    from service.settings import Settings

    settings = Settings()
    made = create_topics(
        settings.kafka, settings.limits, all_topics(settings.kafka),
        partitions=partitions, replication=replication,
    )  # fmt: skip
    for name, is_new in made.items():
        print(f"{name}: {'created' if is_new else 'was there already'}")


def _companions(
    settings: "Settings", engine: "Engine", meter: "LagMeter", stop: threading.Event
) -> list[threading.Thread]:
    """What runs beside the loop: the relay of dead letters, and the report on how far behind it is."""
    from service.ingest import consumer_lag
    from service.ingest.dead_letter_relay import LetterRelay
    from service.ingest.kafka import Publisher
    from service.ingest.messages import topics_of

    kafka = settings.kafka
    relay = LetterRelay(
        engine, lambda: Publisher(kafka, settings.limits), topics_of(kafka),
        default=kafka.dead_letter_topic, keep_days=kafka.dead_letter_days,
    )  # fmt: skip
    reported = (engine, meter, f"{socket.gethostname()}:{os.getpid()}", stop)
    return [
        threading.Thread(target=relay.run, args=(stop,), name="dead-letters"),
        threading.Thread(target=consumer_lag.keep_reporting, args=reported, name="lag"),
    ]


@contextmanager
def _beside(threads: list[threading.Thread], stop: threading.Event) -> Iterator[None]:
    """Run threads that end on `stop` while the block runs."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def _disposing(engine: "Engine") -> Iterator[None]:
    try:
        yield
    finally:
        engine.dispose()


def _take(
    settings: "Settings", engine: "Engine", directory: "Directory", meter: "LagMeter", stop: threading.Event
) -> None:
    """Consume until `stop`."""
    from service.database.secrets import fingerprint_key
    from service.ingest.consuming import Consumer
    from service.ingest.intake import Intake
    from service.ingest.message_reader import Reader
    from service.ingest.messages import topics_of
    from service.ingest.writer import Writer

    found = topics_of(settings.kafka)
    subscription = _joined(settings, list(found), stop)
    if subscription is not None:
        reader = Reader(Intake(settings.limits, fingerprint_key(engine)), directory, found)
        Consumer(subscription, reader, Writer(engine), meter).run(stop)
        subscription.close()


def _joined(settings: "Settings", names: list[str], stop: threading.Event) -> "Subscription | None":
    """Join the group as soon as a broker answers; None: told to stop before."""
    from service import telemetry
    from service.errors import Unavailable
    from service.ingest.kafka import Subscription

    while not stop.is_set():
        try:
            return Subscription(settings.kafka, settings.limits, names)
        except Unavailable as error:
            telemetry.logger().warning("kafka_unavailable", detail=error.detail)
            stop.wait(JOIN_PAUSE_SECONDS)
    return None
