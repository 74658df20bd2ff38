"""`yoro keys create | list | revoke`: API keys and their roles."""

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

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
    wide = {"prefix": 12, "created": 10}
    columns = ("prefix", "name", "roles", "policies", "rate", "created", "ends")
    table = Table(
        *(Column(name, overflow="fold", min_width=wide.get(name)) for name in columns), box=SIMPLE_HEAD
    )
    with connect(url, key, data) as client:
        for found in client.keys():  # noqa: SIM118 - no dictionary
            table.add_row(
                found["prefix"], found["name"], ", ".join(found["roles"]),
                "all" if found["policies"] is None else ", ".join(found["policies"]),
                "" if found["rate_per_second"] is None else f"{found['rate_per_second']:g}/s",
                found["created_at"][:10], _end(found),
            )  # fmt: skip
    Console().print(table)


@app.command()
def revoke(prefix: str, url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA) -> None:
    """Revoke the key that starts with this prefix; it fails within a second everywhere."""
    with connect(url, key, data) as client:
        client.revoke_key(prefix)


def _end(key: dict[str, Any]) -> str:
    if key["revoked_at"]:
        return f"revoked {key['revoked_at'][:10]}"
    return f"expires {key['expires_at'][:10]}" if key["expires_at"] else ""
