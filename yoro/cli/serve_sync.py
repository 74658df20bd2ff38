"""`yoro serve-sync`: keep inference servers at the promoted version."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect
from yoro.client import ApiError

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
    from service.adapters.replicas import Replica, Sglang, Vllm
    from service.adapters.serving import Synchroniser, Wanted, wanted
    from yoro.pull import PullError, pull_version
    from yoro.signature import load_verify_key

    trusted = load_verify_key(verify_key) if verify_key is not None else None
    replicas: list[Replica] = [
        *(Vllm(each, server_key) for each in vllm),
        *(Sglang(each, server_key) for each in sglang),
    ]
    if not replicas:
        raise typer.BadParameter("name at least one server with --vllm or --sglang")
    synchronisers = [Synchroniser(each, policy, slots=slots, drain_seconds=drain) for each in replicas]
    said, target, in_use = "", None, _in_use(into)
    with connect(url, key, data) as client:

        def asked() -> Wanted | None:
            manifest = client.adapter(policy, pointer)
            if not manifest["version"]:
                return None
            folder = pull_version(client, policy, into, manifest, trusted)
            place = f"{server_folder.rstrip('/')}/{folder.name}" if server_folder else str(folder.resolve())
            return wanted(policy, manifest, place)

        while True:
            trouble = ""
            try:
                target = asked()
            except (ApiError, PullError, httpx.TransportError) as error:
                trouble = str(error)  # the servers are kept at what was wanted last
            # One load at a time, one server after the other; one that is away keeps nobody waiting.
            states = [synchroniser.reconcile(target, in_use) for synchroniser in synchronisers]
            if not trouble and all(state.ready for state in states):
                in_use = target.name if target else None  # from here on the one before drains
            report = {
                "policy": policy, "name": in_use, "trouble": trouble,
                "replicas": [asdict(state) for state in states],
            }  # fmt: skip
            said = _say(report, said, into)
            if once:
                raise typer.Exit(0 if not trouble and all(state.ready for state in states) else 1)
            time.sleep(POLL_SECONDS)


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
