"""`yoro status POLICY`: why is nothing training?"""

import time
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect
from yoro.client import ApiError, Client

NO_BREAK = "\u00a0"
"""A space that keeps a reason and its number on one line."""


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
            for shown in _screens(client, policy):
                live.update(shown, refresh=True)
                time.sleep(1.0)


def _screens(client: Client, policy: str) -> Iterator[Group]:
    """Yield the screen again and again; a service that is away for a while does not end the watch."""
    shown = screen(client.status(policy))
    while True:
        yield shown
        try:
            shown = screen(client.status(policy))
        except (httpx.TransportError, ApiError) as error:
            shown = Group(Text(f"no answer: {error}", style="red"), shown)


def screen(document: dict[str, Any]) -> Group:
    """Return the status document as a person reads it."""
    following = document["next_batch"]
    paused = ", paused" if document["paused"] else ""
    lines = [
        f"{document['policy']}: version {document['head_version']}, promoted "
        f"{document['promoted_version']}{paused}",
        _trainer(document),
        f"next batch: {following['ready_tasks']} of {following['size']} tasks, "
        + (following["blocked_by"] or "forming now"),
    ]
    alerts = [Text(f"! {alert['code']}: {alert['detail']}", style="yellow") for alert in document["alerts"]]
    return Group(*(Text(line) for line in lines), *alerts, _counts(document), *_last_step(document))


def _trainer(document: dict[str, Any]) -> str:
    trainer, age = document["trainer"], document["trainer"]["heartbeat_age_s"]
    # A trainer takes the lease when there is work: without a batch, none at work says nothing.
    unneeded = trainer["state"] == "absent" and not document["rollouts"].get("batched")
    return (
        f"trainer: {'none at work, no batch waits' if unneeded else trainer['state']}"
        + (f", batch {trainer['batch']}" if trainer["batch"] else "")
        + (f", last heartbeat {_age(age)} ago" if age is not None else "")
        + (f", {trainer['diagnosis']}" if trainer["diagnosis"] else "")
    )


def _counts(document: dict[str, Any]) -> Table:
    oldest = {
        "waiting_reward": document["oldest_waiting_reward_age_s"],
        "ready": document["next_batch"]["oldest_ready_age_s"],
    }
    table = Table(
        "state", Column("rollouts", justify="right"), Column("oldest", justify="right"), "reasons",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    for state, count in document["rollouts"].items():
        reasons = document["reasons"].get(state, {})
        words = ", ".join(f"{name}{NO_BREAK}{number}" for name, number in reasons.items())
        table.add_row(state, str(count), _age(oldest.get(state)), words)
    if document["grades_waiting_for_trace"]:
        waiting = f"{document['grades_waiting_for_trace']} grades"
        table.add_row("(no trace yet)", "", _age(document["oldest_grade_waiting_for_trace_age_s"]), waiting)
    if document["late_grades"]:
        table.add_row("(came late)", "", "", f"{document['late_grades']} grades")
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


def _age(seconds: float | None) -> str:
    """Return an age in the unit that a person would use."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
