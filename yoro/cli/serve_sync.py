"""`yoro serve-sync`: keep inference servers at the promoted version."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer
from rich.console import Console

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect
from yoro.client import ApiError, Client
from yoro.pull import PullError, pull_version
from yoro.signature import VerifyKey, load_verify_key

if TYPE_CHECKING:
    from service.adapters.serving import State, Synchroniser, Wanted

POLL_SECONDS = 5.0
"""Also how soon a server that restarted gets its adapters back."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("serve-sync")(serve_sync)


def serve_sync(
    policy: str,
    vllm: Annotated[list[str], typer.Option(help="URL of a vLLM server; repeat for replicas.")] = [],  # noqa: B006
    sglang: Annotated[list[str], typer.Option(help="URL of an SGLang server; repeat for replicas.")] = [],  # noqa: B006
    into: Annotated[Path, typer.Option(help="Folder to pull into.")] = Path("adapters"),
    server_folder: Annotated[
        str, typer.Option(help="That folder as the servers see it; else the same.")
    ] = "",
    server_key: Annotated[str, typer.Option(help="API key of the servers.")] = "",
    pointer: Annotated[str, typer.Option(help="promoted or latest.")] = "promoted",
    slots: Annotated[int, typer.Option(min=2, help="Adapters a server holds at once: --max-loras.")] = 2,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that an old version stays loaded.")] = 300.0,
    once: Annotated[bool, typer.Option("--once", help="Reconcile once; fail unless all are ready.")] = False,
    verify_key: Annotated[Path | None, typer.Option(help="Public key that versions are signed with.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Load each promoted version under its own name, probe it, unload old ones after a drain time.

    INTO/serving.json says which name is ready on every server, and how each stands.
    """
    trusted = load_verify_key(verify_key) if verify_key is not None else None
    servers = _servers(policy, vllm, sglang, server_key, slots=slots, drain=drain)
    with connect(url, key, data) as client:
        asked = partial(_wanted, client, policy, pointer, into, server_folder, trusted)
        loop = _Loop(policy, into, servers, asked, in_use=_in_use(into))
        while True:
            as_wanted = loop.turn()
            if once:
                raise typer.Exit(0 if as_wanted else 1)
            time.sleep(POLL_SECONDS)


@dataclass
class _Loop:
    """Servers, and what they were told; one `turn` after the other."""

    policy: str
    into: Path
    servers: "list[Synchroniser]"
    asked: "Callable[[], Wanted | None]"
    """The version to serve; None: the base model alone. Raises what pulling raises."""
    in_use: str | None
    """The name that callers are told."""
    target: "Wanted | None" = None
    said: str = ""

    def turn(self) -> bool:
        """Bring every server to what is wanted now and report; tell whether all of them serve it."""
        trouble = self._ask()
        # One load at a time, one server after the other; one that is away keeps nobody waiting.
        states = [server.reconcile(self.target, self.in_use) for server in self.servers]
        as_wanted = not trouble and all(state.ready for state in states)
        if as_wanted:
            self.in_use = self.target.name if self.target else None  # from here on the one before drains
        self._report(trouble, states)
        return as_wanted

    def _ask(self) -> str:
        """Look up what is wanted; return what kept it from that: the servers stay at what was wanted last."""
        try:
            self.target = self.asked()
        except (ApiError, PullError, httpx.TransportError) as error:
            return str(error)
        return ""

    def _report(self, trouble: str, states: "list[State]") -> None:
        report = {
            "policy": self.policy, "name": self.in_use, "trouble": trouble,
            "replicas": [asdict(state) for state in states],
        }  # fmt: skip
        self.said = _say(report, self.said, self.into)


def _servers(
    policy: str, vllm: list[str], sglang: list[str], key: str, *, slots: int, drain: float
) -> "list[Synchroniser]":
    from service.adapters.replicas import Replica, Sglang, Vllm
    from service.adapters.serving import Synchroniser

    replicas: list[Replica] = [*(Vllm(each, key) for each in vllm), *(Sglang(each, key) for each in sglang)]
    if not replicas:
        raise typer.BadParameter("name at least one server with --vllm or --sglang")
    return [Synchroniser(each, policy, slots=slots, drain_seconds=drain) for each in replicas]


def _wanted(
    client: Client, policy: str, pointer: str, into: Path, server_folder: str, trusted: VerifyKey | None
) -> "Wanted | None":
    """Pull the version that the pointer is at; None: version 0, the base model."""
    from service.adapters.serving import wanted

    manifest = client.adapter(policy, pointer)
    if not manifest["version"]:
        return None
    folder = pull_version(client, policy, into, manifest, trusted)
    place = f"{server_folder.rstrip('/')}/{folder.name}" if server_folder else str(folder.resolve())
    return wanted(policy, manifest, place)


def _in_use(into: Path) -> str | None:
    """Return the name that callers were told before this process started."""
    try:
        name = json.loads((into / "serving.json").read_text())["name"]
    except (OSError, ValueError, KeyError):
        return None
    return None if name is None else str(name)


def _say(report: dict[str, Any], said: str, into: Path) -> str:
    """Write and print the report if it says something new; return it."""
    text = json.dumps(report, indent=2)
    if text != said:
        into.mkdir(parents=True, exist_ok=True)
        fresh = into / f".serving-{os.getpid()}.json"
        fresh.write_text(text)
        fresh.replace(into / "serving.json")
        Console().print_json(text)
    return text
