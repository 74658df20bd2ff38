"""`yoro pull`: fetch an adapter version."""

from pathlib import Path
from typing import Annotated

import typer

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(pull)


def pull(
    policy: str,
    into: Annotated[Path, typer.Option(help="Folder to pull into.")] = Path("adapters"),
    version: Annotated[str, typer.Option(help="latest, promoted or a number.")] = "latest",
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Download a version, verify every checksum, and point INTO/current at it."""
    from yoro.pull import pull as fetch

    with connect(url, key, data) as client:
        folder = fetch(client, policy, into, version)
    print(folder)
