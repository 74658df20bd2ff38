"""Pull an adapter version into a folder: download, verify every sha256, swap a link atomically.

    DIR/{policy}-v12/      the version: stock PEFT files and manifest.json
    DIR/current            link to the newest pulled version, swapped in one rename

Invariants: a version's folder appears whole or not at all; a client killed at any byte leaves what
was there before.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from yoro.client import Client

LINK = "current"


class PullError(Exception):
    """What came is not what the manifest promises, or there is nothing to pull."""


def pull(client: Client, policy: str, into: Path, which: str = "latest") -> Path:
    """Fetch a version and point `current` at it; return the version's folder. Raises PullError, ApiError."""
    manifest = client.adapter(policy, which)
    version = int(manifest["version"])
    if version == 0:
        raise PullError(f"{policy} has no version yet: {which} is 0, the base model itself")
    into.mkdir(parents=True, exist_ok=True)
    target = into / f"{policy}-v{version}"
    if not is_whole(target, manifest):
        _fetch(client, policy, manifest, target)
    _swap_link(into, target.name)
    return target


def is_whole(folder: Path, manifest: dict[str, Any]) -> bool:
    """Tell whether a pulled folder still has every file as the manifest says."""
    return folder.is_dir() and all(
        (folder / entry["name"]).is_file() and _sha256(folder / entry["name"]) == entry["sha256"]
        for entry in manifest["files"]
    )


def _fetch(client: Client, policy: str, manifest: dict[str, Any], target: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for entry in manifest["files"]:
            _fetch_file(client, policy, int(manifest["version"]), entry, partial)
        _write_durably(partial / "manifest.json", json.dumps(manifest, indent=2).encode())
        partial.chmod(0o755)
        _sync_folder(partial)
        if target.exists():  # a damaged copy: aside with it, so that the rename can take its place
            shutil.rmtree(target)
        partial.rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch_file(client: Client, policy: str, version: int, entry: dict[str, Any], folder: Path) -> None:
    name = str(entry["name"])
    if Path(name).name != name:
        raise PullError(f"The manifest names a file outside its folder: {name!r}")
    digest = hashlib.sha256()
    with client.adapter_file(policy, version, name) as chunks, (folder / name).open("wb") as out:
        for chunk in chunks:
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != entry["sha256"]:
        raise PullError(f"{name} came with sha256 {digest.hexdigest()}, the manifest says {entry['sha256']}")


def _swap_link(into: Path, name: str) -> None:
    """Point `current` at a version; readers see the old or the new one, never none."""
    fresh = into / f".{LINK}-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(name)
    fresh.replace(into / LINK)
    _sync_folder(into)


def _write_durably(path: Path, body: bytes) -> None:
    with path.open("wb") as out:
        out.write(body)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
