"""Files of adapter versions behind fsspec: a local folder, s3://, gs://, memory://.

Knows no database. Invariants: a folder is never written twice; the manifest is written last and
carries size and sha256 of every file, so a folder without a manifest is nobody's; published bytes
never change.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from service.errors import AdapterRejected, Conflict, NotFound

MANIFEST = "manifest.json"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a version. Example: {"name": "adapter_config.json", "size": 812, "sha256": "9f…"}."""

    name: str
    size: int
    sha256: str


class AdapterStore:
    """Version folders under one fsspec URL."""

    def __init__(self, url: str) -> None:
        """Open the store; a local folder is made on the first write."""
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._vouched: dict[str, tuple[Any, ...]] = {}

    @property
    def local_root(self) -> Path | None:
        """Return the folder where the store is one, for serving without a copy."""
        return Path(self._root) if isinstance(self._files, LocalFileSystem) else None

    def write_version(self, folder: str, source: Path, manifest: Mapping[str, Any]) -> str:
        """Copy every file of `source` into a new folder, the manifest last; return the manifest's sha256.

        Raises Conflict if the folder exists: the caller takes another name.
        """
        target = f"{self._root}/{folder}"
        if self._files.exists(target):
            raise Conflict(f"{folder} exists in the adapter store", code="folder_exists")
        self._files.makedirs(target, exist_ok=False)
        for file in sorted(source.iterdir()):
            self._put(f"{target}/{file.name}", file.read_bytes())
        self._sync_folder(target)
        body = json.dumps(manifest, indent=2, sort_keys=True).encode()
        self._put(f"{target}/{MANIFEST}", body)
        self._sync_folder(target)
        return hashlib.sha256(body).hexdigest()

    def vouch(self, folder: str, expected: StoredFile) -> None:
        """Check a stored file's size and sha256; the bytes are read once, and again if the file changes.

        Raises AdapterRejected (`torn_file`) or NotFound.
        """
        path = f"{self._root}/{folder}/{expected.name}"
        mark = self._mark(path)
        if self._vouched.get(path) == mark:
            return
        digest, size = hashlib.sha256(), 0
        for chunk in self.read(folder, expected.name):
            digest.update(chunk)
            size += len(chunk)
        _compare(StoredFile(expected.name, size, digest.hexdigest()), expected)
        self._vouched[path] = mark

    def read_manifest(self, folder: str) -> tuple[dict[str, Any], str]:
        """Return a version's manifest and its sha256. Raises NotFound."""
        body = b"".join(self.read(folder, MANIFEST))
        manifest: dict[str, Any] = json.loads(body)
        return manifest, hashlib.sha256(body).hexdigest()

    def read(self, folder: str, name: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of one file. Raises NotFound."""
        path = f"{self._root}/{folder}/{name}"
        if not self._files.exists(path):
            raise NotFound(f"{folder}/{name} is not in the adapter store")
        return self._chunks(path, start, stop)

    def download(
        self, folder: str, target: Path, *, with_state: bool = False, manifest_sha256: str | None = None
    ) -> dict[str, Any]:
        """Copy a version into `target`, check every size and sha256, return the manifest.

        `with_state`: the optimizer's state too. `manifest_sha256`: what the registry says of the manifest,
        which finds a folder swapped for another. Raises AdapterRejected.
        """
        manifest, digest = self.read_manifest(folder)
        if manifest_sha256 not in (None, digest):
            raise AdapterRejected(
                f"{folder}: the manifest has sha256 {digest}, the registry says {manifest_sha256}",
                code="swapped_manifest",
            )
        target.mkdir(parents=True, exist_ok=True)
        for entry in [*manifest["files"], *(manifest["state"] if with_state else [])]:
            with (target / entry["name"]).open("wb") as out:
                for chunk in self.read(folder, entry["name"]):
                    out.write(chunk)
            check_file(target / entry["name"], StoredFile(**entry))
        return manifest

    def folders(self, policy: str) -> list[str]:
        """Return the policy's folders, published or not."""
        parent = f"{self._root}/{policy}"
        self._files.invalidate_cache()
        if not self._files.exists(parent):
            return []
        return sorted(f"{policy}/{Path(path).name}" for path in self._files.ls(parent, detail=False))

    def delete(self, folder: str) -> None:
        """Remove a folder if it is there; only the garbage collector does, never the trainer.

        The manifest goes first: what is left of an interrupted removal is nobody's.
        """
        path = f"{self._root}/{folder}"
        if self._files.exists(f"{path}/{MANIFEST}"):
            self._files.rm_file(f"{path}/{MANIFEST}")
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def _chunks(self, path: str, start: int, stop: int | None) -> Iterator[bytes]:
        with self._files.open(path, "rb") as handle:
            handle.seek(start)
            left = None if stop is None else stop - start
            while left is None or left > 0:
                chunk = handle.read(_CHUNK if left is None else min(_CHUNK, left))
                if not chunk:
                    return
                left = None if left is None else left - len(chunk)
                yield chunk

    def _mark(self, path: str) -> tuple[Any, ...]:
        """Return what changes when a stored file does."""
        try:
            info = self._files.info(path)
        except FileNotFoundError as error:
            raise NotFound(f"{path.removeprefix(self._root)} is not in the adapter store") from error
        return tuple(info.get(name) for name in ("size", "mtime", "ino", "ETag", "etag", "created"))

    def _put(self, path: str, body: bytes) -> None:
        """Write a file that must not exist. The store itself refuses: a folder on opening, s3 on closing."""
        try:
            with self._open_new(path) as out:
                out.write(body)
                if self.local_root is not None:
                    out.flush()
                    os.fsync(out.fileno())
        except FileExistsError as error:
            raise Conflict(f"{path} exists in the adapter store", code="folder_exists") from error

    def _open_new(self, path: str) -> Any:
        try:
            return self._files.open(path, "xb")
        except (ValueError, NotImplementedError):
            return self._files.open(path, "wb")

    def _sync_folder(self, path: str) -> None:
        """Make the folder's entries durable; object stores are when the write returns."""
        if self.local_root is None:
            return
        for folder in (path, os.path.dirname(path), str(self.local_root)):
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def describe_file(path: Path) -> StoredFile:
    """Return name, size and sha256 of a local file."""
    with path.open("rb") as handle:
        return StoredFile(path.name, path.stat().st_size, hashlib.file_digest(handle, "sha256").hexdigest())


def check_file(path: Path, expected: StoredFile) -> None:
    """Compare a local file with its manifest entry. Raises AdapterRejected (`torn_file`)."""
    _compare(describe_file(path), expected)


def _compare(found: StoredFile, expected: StoredFile) -> None:
    if found != expected:
        raise AdapterRejected(
            f"{expected.name}: {found.size} bytes with sha256 {found.sha256}, "
            f"the manifest says {expected.size} bytes with {expected.sha256}",
            code="torn_file",
        )
