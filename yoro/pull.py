"""Pull an adapter version into a folder: download, verify every sha256, swap a link atomically.

    DIR/{policy}-v12/           the version: stock PEFT files and manifest.json
    DIR/current                 link to the version pulled last, swapped in one rename
    DIR/.{policy}-v13.partial/  what has come of a version so far; the next pull goes on from there

Invariants: a version's folder appears whole or not at all; a client killed at any byte leaves what
was there before; pulls into one folder wait for each other.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from yoro import retries
from yoro.client import Client
from yoro.retries import ApiError
from yoro.signature import PullError, VerifyKey, verify_signature

__all__ = ["PullError", "is_whole", "point_at", "pull", "pull_version", "remove_older"]

LINK = "current"
TRIES = 8
"""Connections that may break over one file without a byte having come."""


def pull(
    client: Client, policy: str, into: Path, which: str = "latest", verify_key: VerifyKey | None = None
) -> Path:
    """Fetch a version and point `current` at it; return the version's folder. Raises PullError, ApiError."""
    manifest = client.adapter(policy, which)
    if which.isdecimal() and manifest["version"] != int(which):
        raise PullError(f"Asked for version {which}, and version {manifest['version']} came")
    target = pull_version(client, policy, into, manifest, verify_key)
    point_at(into, target.name)
    return target


def pull_version(
    client: Client, policy: str, into: Path, manifest: dict[str, Any], verify_key: VerifyKey | None = None
) -> Path:
    """Fetch the version of a manifest, unless it is here whole; return its folder."""
    version = int(manifest["version"])
    if version == 0:
        raise PullError(f"{policy} has no version yet: it is at 0, the base model itself")
    if verify_key is not None:
        verify_signature(manifest, verify_key)
        if manifest["policy"] != policy:
            raise PullError(f"The manifest is one of {manifest['policy']!r}, not of {policy!r}")
    into.mkdir(parents=True, exist_ok=True)
    target = into / f"{policy}-v{version}"
    with _alone(into):
        if not is_whole(target, manifest):
            _fetch(client, policy, manifest, target)
            for given_up in into.glob(f".{policy}-v*.partial"):  # the pointer went on before it was whole
                shutil.rmtree(given_up)
    return target


def is_whole(folder: Path, manifest: dict[str, Any]) -> bool:
    """Tell whether a pulled folder still has every file as the manifest says."""
    return (folder / "manifest.json").is_file() and all(
        (folder / entry["name"]).is_file() and _sha256(folder / entry["name"]) == entry["sha256"]
        for entry in manifest["files"]
    )


def point_at(into: Path, name: str | None) -> None:
    """Point `current` at a version, or at nothing; readers see the old or the new one."""
    with _alone(into):
        if name is None:
            (into / LINK).unlink(missing_ok=True)
        else:
            fresh = into / f".{LINK}.new"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(name)
            fresh.replace(into / LINK)
        _sync_folder(into)


def remove_older(into: Path, policy: str, keep: int) -> list[str]:
    """Remove all versions but the `keep` pulled last and the current one; return the names of those gone."""
    named = re.compile(re.escape(policy) + r"-v\d+")
    with _alone(into):
        pulled = [path for path in into.resolve().iterdir() if named.fullmatch(path.name)]
        doomed = sorted(pulled, key=lambda path: path.stat().st_mtime)[:-keep]
        doomed = [path for path in doomed if path != (into / LINK).resolve()]
        for path in doomed:
            aside = path.rename(into / f".{path.name}.removed")  # never half there under its name
            shutil.rmtree(aside)
    return [path.name for path in doomed]


def _fetch(client: Client, policy: str, manifest: dict[str, Any], target: Path) -> None:
    partial = target.parent / f".{target.name}.partial"
    partial.mkdir(exist_ok=True)
    for entry in manifest["files"]:
        _fetch_file(client, policy, int(manifest["version"]), entry, partial)
    _write_durably(partial / "manifest.json", json.dumps(manifest, indent=2).encode())
    for stranger in {path.name for path in partial.iterdir()} - _names(manifest):
        (partial / stranger).unlink()
    _sync_folder(partial)
    if target.exists():  # a damaged copy: aside with it, so that the rename can take its place
        shutil.rmtree(target)
    partial.rename(target)
    _sync_folder(target.parent)


def _names(manifest: dict[str, Any]) -> set[str]:
    return {"manifest.json"} | {str(entry["name"]) for entry in manifest["files"]}


def _fetch_file(client: Client, policy: str, version: int, entry: dict[str, Any], folder: Path) -> None:
    """Bring one file, going on from what is there; if the whole turns out wrong, once more from the start."""
    name = str(entry["name"])
    if Path(name).name != name or name.startswith(".") or name == "manifest.json":
        raise PullError(f"The manifest names a file outside its folder: {name!r}")
    path = folder / name
    resumed = path.exists() and path.stat().st_size > 0
    _complete(client, policy, version, path, int(entry["size"]))
    found = _sha256(path)
    if found != entry["sha256"]:
        path.unlink()
        if not resumed:
            raise PullError(f"{name} came with sha256 {found}, the manifest says {entry['sha256']}")
        _fetch_file(client, policy, version, entry, folder)


def _complete(client: Client, policy: str, version: int, path: Path, size: int) -> None:
    """Append what is missing; a connection that breaks is made again as long as bytes come."""
    attempt = 0
    while (start := path.stat().st_size if path.exists() else 0) < size or not path.exists():
        try:
            _append(client, policy, version, path, start)
        except (httpx.TransportError, ConnectionError):
            attempt = attempt + 1 if path.exists() and path.stat().st_size == start else 0
            if attempt >= TRIES:
                raise
            time.sleep(retries.backoff(attempt))
        except ApiError as error:
            attempt += 1
            if error.status not in retries.RETRIED_STATUSES or attempt >= TRIES:
                raise
            time.sleep(retries.backoff(attempt))
        else:
            break  # the answer ended as it should: size and sha256 are judged by the caller


def _append(client: Client, policy: str, version: int, path: Path, start: int) -> None:
    with client.adapter_file(policy, version, path.name, start) as chunks, path.open("ab") as out:
        try:
            for chunk in chunks:
                out.write(chunk)
        finally:
            out.flush()
            os.fsync(out.fileno())


@contextmanager
def _alone(into: Path) -> Iterator[None]:
    with (into / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
