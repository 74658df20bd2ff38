"""`yoro keys create | list | revoke`: API keys and their roles."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect

app = typer.Typer(help="API keys and their roles.", no_args_is_help=True)


@app.command()
def create(
    name: str,
    role: Annotated[
        list[str], typer.Option(help="agent, grader, ops, dashboard, reader or admin; repeatable.")
    ],
    policy: Annotated[list[str], typer.Option(help="Policies it may touch; none given: all.")] = [],  # noqa: B006
    expires_in_days: Annotated[
        float | None, typer.Option(help="Life of the key; else it does not end.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Documents a second from it, an api process; else the server's default."),
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Create a key and print it, once."""
    with connect(url, key, data) as client:
        made = client.create_key(name, role, policy or None, expires_in_days, rate)
    print(made["key"])


@app.command("list")
def list_(url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA) -> None:
    """List keys by what is stored of them."""
    table = Table("prefix", "name", "roles", "policies", "rate", "created", "expires", "revoked")
    with connect(url, key, data) as client:
        for found in client.keys():  # noqa: SIM118 - no dictionary
            table.add_row(
                found["prefix"], found["name"], ", ".join(found["roles"]),
                "all" if found["policies"] is None else ", ".join(found["policies"]),
                "" if found["rate_per_second"] is None else f"{found['rate_per_second']:g}/s",
                found["created_at"], found["expires_at"] or "", found["revoked_at"] or "",
            )  # fmt: skip
    Console().print(table)


@app.command()
def revoke(prefix: str, url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA) -> None:
    """Revoke the key that starts with this prefix; it fails within a second everywhere."""
    with connect(url, key, data) as client:
        client.revoke_key(prefix)
