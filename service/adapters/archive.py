"""A version as one tar: the same bytes whoever makes it and whenever, so that it can be resumed.

Knows no HTTP. Invariants: entries in a fixed order, no times, no owners; size and every byte follow
from manifest and files alone, so that any range of it can be made without making the rest.
"""

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.adapters.store import MANIFEST, AdapterStore, StoredFile


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of bytes: known ones, or a stored file's."""

    size: int
    body: bytes | None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Archive:
    """The tar of one version."""

    folder: str
    parts: tuple[_Part, ...]

    @property
    def size(self) -> int:
        """Return the tar's size in bytes."""
        return sum(part.size for part in self.parts)

    def read(self, store: AdapterStore, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes [start, stop)."""
        at = 0
        for part in self.parts:
            first, last = max(start - at, 0), min(stop - at, part.size)
            if first < last and part.body is not None:
                yield part.body[first:last]
            elif first < last:
                yield from store.read(self.folder, part.name, first, last)
            at += part.size


def archive(folder: str, top: str, manifest: bytes, files: Sequence[StoredFile]) -> Archive:
    """Lay out the tar of a version below the folder `top`: the manifest, then its files by name."""
    parts = [*_entry(f"{top}/{MANIFEST}", len(manifest), manifest, MANIFEST)]
    for file in sorted(files, key=lambda each: each.name):
        parts += _entry(f"{top}/{file.name}", file.size, None, file.name)
    parts.append(_zeros(2 * tarfile.BLOCKSIZE))
    return Archive(folder, tuple(parts))


def _entry(path: str, size: int, body: bytes | None, name: str) -> list[_Part]:
    header = tarfile.TarInfo(path)
    header.size, header.mode, header.mtime = size, 0o644, 0
    block = header.tobuf(tarfile.PAX_FORMAT)
    return [_Part(len(block), block), _Part(size, body, name), _zeros(-size % tarfile.BLOCKSIZE)]


def _zeros(size: int) -> _Part:
    return _Part(size, bytes(size))
