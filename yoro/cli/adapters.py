"""`yoro pull`; `yoro adapters list | show | diff | promote | rollback | pin | export | gc | …`."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect
from yoro.cli.processes import Database

app = typer.Typer(help="Versions of a policy: see, promote, roll back, keep, remove.", no_args_is_help=True)

Note = Annotated[str, typer.Option(help="Goes into the record of the move.")]
Force = Annotated[bool, typer.Option("--force", help="Take a tainted version too.")]
UNKNOWN = "-"


def register(parent: typer.Typer) -> None:
    """Add the verbs."""
    parent.command()(pull)
    parent.add_typer(app, name="adapters")


def pull(
    policy: str,
    into: Annotated[Path, typer.Option(help="Folder to pull into.")] = Path("adapters"),
    version: Annotated[str, typer.Option(help="latest, promoted or a number.")] = "latest",
    watch: Annotated[bool, typer.Option("--watch", help="Go on following the pointer, both ways.")] = False,
    run: Annotated[
        str, typer.Option(help="With --watch: command for each version; {policy}, {version}, {folder}.")
    ] = "",
    keep: Annotated[int, typer.Option(min=0, help="Versions to keep in INTO beside current; 0: all.")] = 0,
    verify_key: Annotated[
        Path | None, typer.Option(help="Public key (PEM) that the version must be signed with.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Download a version, verify every checksum, and point INTO/current at it."""
    from yoro import following
    from yoro.pull import pull as fetch
    from yoro.pull import remove_older
    from yoro.signature import load_verify_key

    trusted = load_verify_key(verify_key) if verify_key is not None else None
    words = shlex.split(run)

    def arrived(at: int, folder: Path | None) -> None:
        print(folder if folder is not None else f"{policy} is at version 0, the base model", flush=True)
        if words and (code := following.run(words, policy, at, folder)):
            Console(stderr=True).print(f"the command ended with {code}", markup=False)
        if keep:
            remove_older(into, policy, keep)

    def failed(message: str) -> None:
        Console(stderr=True).print(f"yoro pull: {message}", markup=False)

    with connect(url, key, data) as client:
        if not watch:
            print(fetch(client, policy, into, version, trusted))
            if keep:
                remove_older(into, policy, keep)
            return
        if version.isdecimal():
            raise typer.BadParameter("--watch follows latest or promoted: a number never moves")
        following.follow(client, policy, into, version, verify_key=trusted, arrived=arrived, failed=failed)


@app.command("list")
def list_(policy: str, url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA) -> None:
    """List versions, newest first."""
    with connect(url, key, data) as client:
        head, promoted = (int(client.adapter(policy, which)["version"]) for which in ("latest", "promoted"))
        columns = ("version", "parent", "depth", "batch", "reward", "marks")
        created = Column("created", min_width=16)
        table = Table(*(Column(name, overflow="fold") for name in columns), created, box=SIMPLE_HEAD)
        for each in client.adapters(policy):
            reward = each.get("metrics", {}).get("reward/mean")
            table.add_row(
                str(each["version"]), str(each["parent"]), str(each["depth"]),
                str(each.get("batch", UNKNOWN)),
                UNKNOWN if reward is None else f"{reward:.3f}", _marks(each, head, promoted),
                each["created_at"][:16].replace("T", " "),
            )  # fmt: skip
    Console().print(table)


@app.command()
def show(
    policy: str,
    version: Annotated[str, typer.Argument(help="latest, promoted or a number.")] = "latest",
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Show a version's manifest."""
    with connect(url, key, data) as client:
        Console().print_json(json.dumps(client.adapter(policy, version)))


@app.command()
def diff(
    policy: str, a: str, b: str, url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA
) -> None:
    """Compare two versions' manifests field by field."""
    with connect(url, key, data) as client:
        before, after = (_comparable(client.adapter(policy, which)) for which in (a, b))
    table = Table(*(Column(name, overflow="fold") for name in ("field", a, b)), box=SIMPLE_HEAD)
    for name in sorted(before.keys() | after.keys()):
        left, right = before.get(name, UNKNOWN), after.get(name, UNKNOWN)
        if left != right:
            table.add_row(name, left, right)
    Console().print(table)


@app.command()
def promote(
    policy: str, version: int, force: Force = False, note: Note = "",
    url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA,
) -> None:  # fmt: skip
    """Make a version the one that serves."""
    with connect(url, key, data) as client:
        Console().print_json(json.dumps(client.promote(policy, version, force=force, note=note)))


@app.command()
def rollback(
    policy: str, to: int,
    rewind_trainer: Annotated[bool, typer.Option("--rewind-trainer", help="Train on from there.")] = False,
    force: Force = False, note: Note = "",
    url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA,
) -> None:  # fmt: skip
    """Go back to an older version: what serves alone (held there until a promotion), or the trainer too."""
    with connect(url, key, data) as client:
        answer = client.roll_back(policy, to, rewind_trainer=rewind_trainer, force=force, note=note)
        Console().print_json(json.dumps(answer))


@app.command()
def pin(
    policy: str, version: int,
    off: Annotated[bool, typer.Option("--off", help="Leave it to retention again.")] = False,
    url: Url = DEFAULT_URL, key: Key = "", data: Data = DEFAULT_DATA,
) -> None:  # fmt: skip
    """Keep a version's files for good."""
    with connect(url, key, data) as client:
        Console().print_json(json.dumps(client.pin(policy, version, pinned=not off)))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A pulled version, e.g. adapters/current.")],
    target: Annotated[Path, typer.Argument(help="File (GGUF) or folder (merged) to write.")],
    base: Annotated[str, typer.Option(help="The policy's base model: folder or hub name.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Base and adapter in one, not a GGUF LoRA.")
    ] = False,
) -> None:
    """Write a pulled version as a GGUF LoRA (BASE: a folder with config.json), or merged into its base."""
    from yoro import export as formats

    if merged:
        formats.write_merged(folder, base, target)
    else:
        count = formats.write_gguf(folder, formats.shape_of(Path(base, "config.json")), target)
        print(f"{count} tensors in {target}")


@app.command()
def gc(
    keep: Annotated[int, typer.Option(min=1, help="Newest versions kept, of each policy.")] = 50,
    rewindable: Annotated[int, typer.Option(min=1, help="Ancestors of the head kept, for rewinding.")] = 20,
    younger_hours: Annotated[float, typer.Option(min=0, help="Versions younger than this are kept.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
    database_url: Database = None,
    data: Data = DEFAULT_DATA,
) -> None:
    """Remove orphaned folders, and files of versions that retention no longer keeps. Runs on a server."""
    from service.adapters import retention
    from service.adapters.store import AdapterStore
    from yoro.cli.server import server

    rule = retention.Rule(keep, rewindable, younger_hours * 3600)
    with server("adapters gc", database_url, data) as (engine, settings):
        for folder in retention.collect(engine, AdapterStore(settings.store_url), rule, dry_run=dry_run):
            print(f"{'would remove' if dry_run else 'removed'} {folder}")


@app.command()
def recover(database_url: Database = None, data: Data = DEFAULT_DATA) -> None:
    """After a restore, before any trainer starts: never use a number again that the store has seen."""
    from service.adapters import recovery
    from service.adapters.store import AdapterStore
    from service.database.engine import transaction
    from yoro.cli.server import server

    with (
        server("adapters recover", database_url, data, stopped=True) as (engine, settings),
        transaction(engine) as connection,
    ):
        for found in recovery.recover(connection, AdapterStore(settings.store_url)):
            missing = f", files missing of versions {found.missing}" if found.missing else ""
            print(f"{found.policy}: the next version is {found.next_version}{missing}")


@app.command()
def keygen(private: Path, public: Path) -> None:
    """Make the key pair that signs manifests: PRIVATE for `YORO_SIGNING_KEY`, PUBLIC for `--verify-key`."""
    from service.adapters.signing import make_key

    secret, shown = make_key()
    private.touch(mode=0o600, exist_ok=False)
    private.write_bytes(secret)
    public.write_bytes(shown)


def _comparable(manifest: dict[str, Any]) -> dict[str, str]:
    """Return a manifest's leaves but those that tell a person nothing: they always differ."""
    leaves = flat(manifest)
    return {
        name: leaf for name, leaf in leaves.items() if not name.startswith(("probe.logprobs", "signature"))
    }


def flat(document: Any, path: str = "") -> dict[str, str]:
    """Return a document's leaves by their paths."""
    if isinstance(document, dict):
        inner = document
    elif isinstance(document, list):
        inner = {str(entry.get("name", at) if isinstance(entry, dict) else at): entry
                 for at, entry in enumerate(document)}  # fmt: skip
    else:
        return {path: f"{document:.6g}" if isinstance(document, float) else str(document)}
    found: dict[str, str] = {}
    for key, value in inner.items():
        found |= flat(value, f"{path}.{key}" if path else str(key))
    return found


def _marks(version: dict[str, Any], head: int, promoted: int) -> str:
    marks = {
        "latest": version["version"] == head,
        "promoted": version["version"] == promoted,
        "pinned": version["pinned"],
        "tainted": version["tainted"],
        "rewound": version["rewound"],
        "files removed": version["files_removed_at"],
    }
    return ", ".join(name for name, marked in marks.items() if marked)
