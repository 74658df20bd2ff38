"""`yoro dead-letter list | show | replay`: Kafka messages that could not be taken."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect

app = typer.Typer(help="Kafka messages that could not be taken.", no_args_is_help=True)

Code = Annotated[str | None, typer.Option(help="Only letters with this reason, e.g. policy_not_found.")]


@app.command("list")
def list_(
    code: Code = None,
    everything: Annotated[bool, typer.Option("--all", help="Those already replayed, too.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Newest so many.")] = 50,
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """List letters, newest first."""
    table = Table(
        "id", "reason", "topic", "partition", "offset", "trace", "kept", "at", "relayed", "replayed"
    )
    with connect(url, key, data) as client:
        for number, found in enumerate(client.dead_letters(code=code, everything=everything)):
            if number == limit:
                break
            table.add_row(
                str(found["id"]), found["code"], found["topic"], str(found["partition"]),
                str(found["offset"]), found["trace_id"] or "", found["kept"], found["created_at"][:19],
                "yes" if found["relayed"] else found["relay_error"] or "not yet",
                (found["replayed_at"] or "")[:19],
            )  # fmt: skip
    Console().print(table)


@app.command()
def show(letter: int, url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA) -> None:
    """Show one letter with what is kept of it."""
    with connect(url, key, data) as client:
        Console().print_json(json.dumps(client.dead_letter(letter)))


@app.command()
def replay(
    letters: Annotated[list[int] | None, typer.Argument(help="Ids; or give --code.")] = None,
    code: Code = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Take letters in again, after their reason was removed: once, whatever Kafka does meanwhile."""
    asked = set(letters or ())
    with connect(url, key, data) as client:
        for result in client.replay_dead_letters(letters or None, code=code):
            asked.discard(result["id"])
            words = filter(None, (result["status"], result["code"], result["detail"]))
            print(f"{result['id']}: {' '.join(words)}")
    for letter in sorted(asked):
        print(f"{letter}: not replayed: it is not there, was replayed before, or is not kept whole")
