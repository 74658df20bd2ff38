"""`yoro up`, and the processes that it runs: api, schedule, train, migrate."""

import os
import signal
import socket
import threading
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

Lifeline = Annotated[int, typer.Option("--lifeline", hidden=True)]
Database = Annotated[
    str | None,
    typer.Option(
        "--database-url", envvar="YORO_DATABASE_URL", help="Your Postgres, 15 or newer; else an embedded one."
    ),
]
MetricsPort = Annotated[
    int, typer.Option("--metrics-port", help="Serve /metrics, /healthz, /readyz here; 0: nowhere.")
]


class Part(StrEnum):
    """What `yoro up` can leave out."""

    trainer = "trainer"
    scheduler = "scheduler"


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    for verb in (up, api, schedule, train, migrate):
        app.command()(verb)


def up(
    data: Annotated[Path, typer.Option("--data", help="Folder of this installation.")] = Path("yoro-data"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    without: Annotated[list[Part], typer.Option(help="Leave a process out.")] = [],  # noqa: B006 - typer copies it
    kafka: Annotated[
        bool, typer.Option("--kafka", help="Run an embedded broker and a consumer, too.")
    ] = False,
    kafka_port: Annotated[int, typer.Option(help="Port of the embedded broker.")] = 9092,
    database_url: Database = None,
) -> None:
    """Run api, scheduler and trainer on this machine, over an embedded Postgres."""
    from service.settings import Settings
    from yoro.supervisor import Up, run_until_signal

    console = Console(highlight=False)
    running = Up(
        Settings(data=data), host, port, frozenset(without), console.print, kafka_port if kafka else 0
    )
    running.start(database_url)
    console.print(f"yoro is up: {running.url}  (API documentation: {running.url}/docs)")
    if kafka:
        topics = running.settings.kafka
        console.print(
            f"Kafka: 127.0.0.1:{kafka_port}, topics {topics.traces_topic} and {topics.rewards_topic}"
        )
    console.print(f"data, logs and adapters: {data.resolve()}   Ctrl-C stops everything")
    run_until_signal(running)


def api(
    host: str = "127.0.0.1",
    port: int = 8080,
    lifeline: Lifeline = -1,
) -> None:
    """Run the HTTP API alone."""
    import uvicorn

    from service.api.app import create_app
    from service.telemetry import set_up_logging

    set_up_logging("api")
    _hold_on(lifeline)
    # Long-polls may wait a minute: a process that is told to stop does not.
    uvicorn.run(
        create_app(), host=host, port=port, log_level="warning", access_log=False, backlog=1024,
        timeout_graceful_shutdown=5,
    )  # fmt: skip


def schedule(lifeline: Lifeline = -1, metrics_port: MetricsPort = 0) -> None:
    """Run the scheduler alone: forms batches and computes baselines."""
    from service.adapters.promotion import Promoter
    from service.baselines.embedding import Encoder
    from service.batches.scheduler import Scheduler
    from service.database import engine as database
    from service.settings import Settings
    from service.webhooks.relay import Relay

    settings, stop = Settings(), start("scheduler", lifeline)
    engine = database.connect(settings.database_url, name="scheduler")
    _probes(metrics_port, engine)
    relay = threading.Thread(target=Relay(engine, hosts=settings.hook_hosts).run, args=(stop,), daemon=True)
    relay.start()
    promoter = threading.Thread(target=Promoter(engine, settings).run, args=(stop,), daemon=True)
    promoter.start()
    Scheduler(engine, Encoder(settings.encoder), interval_seconds=settings.scheduler_interval_seconds).run(
        stop
    )
    relay.join()
    engine.dispose()


def train(lifeline: Lifeline = -1, metrics_port: MetricsPort = 0) -> None:
    """Run one trainer: takes leases, trains batches, publishes versions."""
    from service.adapters.store import AdapterStore
    from service.database import engine as database
    from service.settings import Settings
    from trainer.restore import Restorer
    from trainer.worker import Worker, use_threads

    settings, stop = Settings(), start("trainer", lifeline)
    use_threads(settings.threads)
    engine = database.connect(settings.database_url, name="trainer")
    _probes(metrics_port, engine)
    store = AdapterStore(settings.store_url)
    holder = f"{socket.gethostname()}:{os.getpid()}"
    Worker(engine, store, settings, holder, Restorer(store, settings)).run(stop)
    engine.dispose()


def migrate(database_url: Database = None) -> None:
    """Bring the database's schema to the newest migration."""
    from service.database import engine as database
    from service.database import migrate as migrations
    from service.settings import Settings

    engine = database.connect(database_url or Settings().database_url, name="migrate")
    migrations.upgrade(engine)
    engine.dispose()


def start(process: str, lifeline: int) -> threading.Event:
    """Set up logging, the lifeline, and an event that SIGINT and SIGTERM set."""
    from service.telemetry import set_up_logging

    set_up_logging(process)
    stop = threading.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: stop.set())
    _hold_on(lifeline)
    return stop


def _hold_on(lifeline: int) -> None:
    from yoro.lifeline import hold_on

    if lifeline >= 0:
        hold_on(lifeline)


def _probes(port: int, engine: object) -> None:
    from sqlalchemy import Engine

    from service.database import migrate as migrations
    from service.telemetry import serve_probes

    if port and isinstance(engine, Engine):
        serve_probes(port, lambda: migrations.is_current(engine))
