"""`yoro demo`: the whole path on this machine, with a real agent and a real grader."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Via(StrEnum):
    """How agent and grader send what they have."""

    http = "http"
    kafka = "kafka"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(demo)


def demo(
    steps: Annotated[int | None, typer.Option(help="Versions to train; else the preset's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the task stream.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="Folder to keep; else a new one under yoro-data/.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the API; 0: any free one.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write the result as JSON, too.")] = None,
    via: Annotated[Via, typer.Option(help="How agent and grader reach yoro.")] = Via.http,
    require_improvement: Annotated[
        bool, typer.Option("--require-improvement", help="Exit 1 unless it improves by 2 standard errors.")
    ] = False,
) -> None:
    """Watch a small model learn from one rollout a task: agent, grader, trainer, adapters."""
    from yoro.demo.run import run_demo

    improved = run_demo(
        steps=steps, seed=seed, data=data, port=port, report=report, via_kafka=via is Via.kafka
    )
    if require_improvement and not improved:
        raise typer.Exit(1)
