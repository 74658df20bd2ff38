"""`yoro status POLICY`: why is nothing training?"""

import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(status)


def status(
    policy: str,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Say what a policy's rollouts, its next batch and its trainer wait for."""
    console = Console(highlight=False)
    with connect(url, key, data) as client:
        if not watch:
            console.print(screen(client.status(policy)))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(screen(client.status(policy)), refresh=True)
                time.sleep(1.0)


def screen(document: dict[str, Any]) -> Group:
    """Return the status document as a person reads it."""
    trainer, following = document["trainer"], document["next_batch"]
    age = trainer["heartbeat_age_s"]
    lines = [
        f"{document['policy']}: version {document['head_version']}, promoted {document['promoted_version']}",
        f"trainer: {trainer['state']}"
        + (f", batch {trainer['batch']}" if trainer["batch"] else "")
        + (f", last heartbeat {age:.0f} s ago" if age is not None else ""),
        f"next batch: {following['ready_tasks']} of {following['size']} tasks, "
        + (following["blocked_by"] or "forming now"),
    ]
    return Group(*(Text(line) for line in lines), _counts(document), *_last_step(document))


def _counts(document: dict[str, Any]) -> Table:
    table = Table("state", "rollouts", "reasons")
    for state, count in document["rollouts"].items():
        reasons = document["reasons"].get(state, {})
        table.add_row(state, str(count), ", ".join(f"{name} {number}" for name, number in reasons.items()))
    if document["grades_waiting_for_trace"]:
        table.add_row("(no trace yet)", "", f"{document['grades_waiting_for_trace']} grades")
    return table


def _last_step(document: dict[str, Any]) -> list[Text]:
    step, ratio = document["last_step"], document["baseline"]["b_eff_ratio"]
    lines = []
    if step:
        reward = step.get("reward/mean")
        lines.append(
            f"last step: batch {step['batch']}, {step['outcome']}"
            + (f", mean reward {reward:.3f}" if reward is not None else "")
        )
    if ratio:
        lines.append(f"baseline: {document['baseline']['in_use']}, B_eff {ratio:.2f} x the batch mean's")
    return [Text(line) for line in lines]
