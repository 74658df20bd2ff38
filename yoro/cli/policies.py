"""`yoro policy create | list | show | set | pause | resume`."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect

app = typer.Typer(
    help="Policies: models under training, each with one settings document.", no_args_is_help=True
)

Assignments = Annotated[
    list[str],
    typer.Option("--set", help="A setting, e.g. `--set optimizer.learning_rate=1e-4`; values are JSON."),
]


@app.command()
def create(
    name: str,
    base_model: Annotated[str, typer.Option(help="Hub name, path below the model root, or smollm2-135m.")],
    assignments: Assignments = [],  # noqa: B006 - typer copies it
    preset: Annotated[
        str | None, typer.Option(help="gs1 or flashreinforce: objective and baseline; --set wins over it.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Create a policy over a base model."""
    document = _document(assignments) | ({} if preset is None else {"preset": preset})
    with connect(url, key, data) as client:
        _show(client.create_policy(name, base_model=base_model, **document))


@app.command("list")
def list_(url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA) -> None:
    """List policies."""
    table = Table("policy", "base model", "settings revision", "paused")
    with connect(url, key, data) as client:
        for policy in client.policies():
            table.add_row(
                policy["name"], policy["settings"]["base_model"], str(policy["settings_revision"]),
                "yes" if policy["paused"] else "no",
            )  # fmt: skip
    Console().print(table)


@app.command()
def show(name: str, url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA) -> None:
    """Show a policy's settings, all of them."""
    with connect(url, key, data) as client:
        _show(client.policy(name))


@app.command("set")
def set_(
    name: str,
    assignments: Annotated[list[str], typer.Argument(help="e.g. `batching.size=16`; values are JSON.")],
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Change settings, as a new revision."""
    with connect(url, key, data) as client:
        _show(client.revise_policy(name, _document(assignments)))


@app.command()
def pause(name: str, url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA) -> None:
    """Stop forming and training batches; intake goes on."""
    with connect(url, key, data) as client:
        client.pause_policy(name)


@app.command()
def resume(name: str, url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA) -> None:
    """Go on after a pause."""
    with connect(url, key, data) as client:
        client.resume_policy(name)


def _show(document: Any) -> None:
    Console().print_json(json.dumps(document))


def _document(assignments: list[str]) -> dict[str, Any]:
    """Return `a.b=1` assignments as a nested document; a value that is not JSON is a string."""
    document: dict[str, Any] = {}
    for assignment in assignments:
        path, found, value = assignment.partition("=")
        if not found:
            raise typer.BadParameter(f"{assignment!r} is not name=value")
        inner = document
        *parents, last = path.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = _value(value)
    return document


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
