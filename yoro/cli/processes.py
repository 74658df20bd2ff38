"""`yoro up`, and the processes that it runs: api, schedule, train, migrate."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from yoro.cli.connection import DEFAULT_DATA, Data

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from service.adapters.store import AdapterStore
    from service.settings import Settings
    from trainer.distributed import Team
    from trainer.restore import Restorer

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
    data: Data = DEFAULT_DATA,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    without: Annotated[
        list[Part],
        typer.Option(help="Leave a process out; without the scheduler no webhook goes and no gate promotes."),
    ] = [],  # noqa: B006 - typer copies it
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
    console.print(f"yoro is up: {running.url}  (API documentation: {running.url}/docs)", soft_wrap=True)
    if kafka:
        topics = running.settings.kafka
        console.print(
            f"Kafka: 127.0.0.1:{kafka_port}, topics {topics.traces_topic} and {topics.rewards_topic}"
        )
    console.print(f"data, logs and adapters: {data.resolve()}   Ctrl-C stops everything", soft_wrap=True)
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

    _stay_on_core()
    set_up_logging("api")
    _hold_on(lifeline)
    # Long-polls may wait a minute: a process that is told to stop does not. Nothing here asks who the client
    # is, so what proxies say of it need not be read, a request at a time.
    uvicorn.run(
        create_app(), host=host, port=port, log_level="warning", access_log=False, backlog=1024,
        timeout_graceful_shutdown=5, proxy_headers=False, server_header=False,
    )  # fmt: skip


def _stay_on_core() -> None:
    """Keep this process on the core that settings name: its threads take turns, and what one leaves in the
    core's cache the next one needs.
    """
    from service.settings import Settings

    core = Settings().api_core
    if core is None:
        return
    allowed = os.sched_getaffinity(0)
    if core not in allowed:
        raise typer.BadParameter(f"YORO_API_CORE={core}: this process may run on {sorted(allowed)}")
    os.sched_setaffinity(0, {core})


def schedule(lifeline: Lifeline = -1, metrics_port: MetricsPort = 0) -> None:
    """Run the scheduler alone: forms batches, computes baselines, judges gated promotion, sends webhooks."""
    from service.adapters.promotion import Promoter
    from service.baselines.embedding import Encoder
    from service.batches.scheduler import Scheduler
    from service.database import engine as database
    from service.settings import Settings
    from service.webhooks.relay import Relay

    settings, stop = Settings(), start("scheduler", lifeline)
    engine = database.connect(settings.database_url, name="scheduler")
    probes(metrics_port, engine)
    relay = threading.Thread(target=Relay(engine, hosts=settings.hook_hosts).run, args=(stop,), daemon=True)
    relay.start()
    promoter = threading.Thread(target=Promoter(engine, settings).run, args=(stop,), daemon=True)
    promoter.start()
    Scheduler(engine, Encoder(settings.encoder), interval_seconds=settings.scheduler_interval_seconds).run(
        stop
    )
    relay.join()
    engine.dispose()


def train(
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard's event files (YORO_TENSORBOARD).")
    ] = None,
    mlflow: Annotated[str, typer.Option(help="MLflow tracking server (YORO_MLFLOW_URL).")] = "",
    wandb: Annotated[str, typer.Option(help="Weights & Biases project (YORO_WANDB_PROJECT).")] = "",
    lifeline: Lifeline = -1,
    metrics_port: MetricsPort = 0,
) -> None:
    """Run one trainer: takes leases, trains batches, publishes versions.

    Under `torchrun` or `accelerate launch`, the processes together are one trainer (docs/training.md).
    """
    from service.adapters.store import AdapterStore
    from service.settings import Settings
    from trainer.distributed import follow, joined_team
    from trainer.restore import Restorer
    from trainer.worker import use_threads

    given = {"tensorboard": tensorboard, "mlflow_url": mlflow, "wandb_project": wandb}
    settings = Settings(**{name: value for name, value in given.items() if value})  # type: ignore[arg-type]
    use_threads(settings.threads)
    store = AdapterStore(settings.store_url)
    with joined_team(settings) as team:
        restorer = Restorer(store, settings, team.prepare if team.mesh else None)
        if team.ranks.rank == 0:
            _lead(settings, restorer, store, team, lifeline, metrics_port)
        else:
            start("trainer", lifeline)
            follow(team.ranks, restorer)


def _lead(
    settings: "Settings",
    restorer: "Restorer",
    store: "AdapterStore",
    team: "Team",
    lifeline: int,
    metrics_port: int,
) -> None:
    """Be the process that knows the database, and say on a terminal what the trainer is at."""
    from service.database import engine as database
    from trainer.progress import Progress
    from trainer.tracking import open_tracking
    from trainer.worker import Worker

    console, progress = Console(), Progress()
    # The line first: logging then writes above it, not through it.
    with progress.shown(console) if console.is_terminal else nullcontext():
        stop = start("trainer", lifeline)
        engine = database.connect(
            settings.database_url, name="trainer", idle_transaction_seconds=settings.lease_seconds
        )
        probes(metrics_port, engine)
        holder, tracking = f"{socket.gethostname()}:{os.getpid()}", open_tracking(settings)
        worker = Worker(
            engine, store, settings, holder, restorer, progress=progress, tracking=tracking, team=team
        )
        worker.run(stop)
        tracking.close()
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


def probes(port: int, engine: "Engine", is_ready: Callable[[], bool] = lambda: True) -> None:
    """Serve probes and metrics on a port other than 0; ready means a current schema, too."""
    from service.database import migrate as migrations
    from service.telemetry import serve_probes

    if port:
        serve_probes(port, lambda: is_ready() and migrations.is_current(engine))
