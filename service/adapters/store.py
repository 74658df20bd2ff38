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

    def download(self, folder: str, target: Path, *, with_state: bool = False) -> dict[str, Any]:
        """Copy a version into `target`, check every size and sha256, return the manifest.

        `with_state`: the optimizer's state too. Raises AdapterRejected.
        """
        manifest, _ = self.read_manifest(folder)
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
        if not self._files.exists(parent):
            return []
        return sorted(f"{policy}/{Path(path).name}" for path in self._files.ls(parent, detail=False))

    def delete(self, folder: str) -> None:
        """Remove a folder; only the garbage collector does, never the trainer."""
        self._files.rm(f"{self._root}/{folder}", recursive=True)

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

    def _put(self, path: str, body: bytes) -> None:
        with self._files.open(path, "wb") as out:
            out.write(body)
            if self.local_root is not None:
                out.flush()
                os.fsync(out.fileno())

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
    found = describe_file(path)
    if found != expected:
        raise AdapterRejected(
            f"{expected.name}: {found.size} bytes with sha256 {found.sha256}, "
            f"the manifest says {expected.size} bytes with {expected.sha256}",
            code="torn_file",
        )
