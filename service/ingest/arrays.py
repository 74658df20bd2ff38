"""Columns of many rows as binary Postgres arrays, for `unnest`.

psycopg's own list dumper is pure Python and quotes text element by element; here a column of n values
costs one join. Knows nothing of tables.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, repeat
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format

_NULL = struct.pack("!i", -1)
_EPOCH = datetime.fromisoformat("2000-01-01T00:00:00+00:00")
_length = struct.Struct("!i").pack


@dataclass(frozen=True, slots=True)
class Array:
    """An encoded array with the oid of its type."""

    oid: int
    encoded: bytes


def bigints(values: Iterable[int | None]) -> Array:
    """Encode bigint[]."""
    return _fixed(1016, 20, "q", 8, list(values))


def integers(values: Iterable[int | None]) -> Array:
    """Encode integer[]."""
    return _fixed(1007, 23, "i", 4, list(values))


def floats(values: Iterable[float | None]) -> Array:
    """Encode float8[]."""
    return _fixed(1022, 701, "d", 8, list(values))


def booleans(values: Iterable[bool]) -> Array:
    """Encode boolean[]."""
    return _fixed(1000, 16, "?", 1, list(values))


def texts(values: Iterable[str | None]) -> Array:
    """Encode text[]. Raises UnicodeEncodeError for a lone surrogate."""
    return _array(1009, 25, [None if value is None else value.encode() for value in values])


def byteas(values: Iterable[bytes | None]) -> Array:
    """Encode bytea[]."""
    return _array(1001, 17, list(values))


def moments(values: Iterable[datetime | None]) -> Array:
    """Encode timestamptz[] of aware times."""
    return _fixed(1185, 1184, "q", 8, [None if value is None else _microseconds(value) for value in values])


def _microseconds(moment: datetime) -> int:
    age = moment - _EPOCH
    return (age.days * 86_400 + age.seconds) * 1_000_000 + age.microseconds


def _fixed(array_oid: int, element_oid: int, code: str, size: int, values: list[Any]) -> Array:
    """Encode values of one width, in a single call where none of them is null."""
    if None in values:
        try:
            packed = [None if value is None else struct.pack(f"!{code}", value) for value in values]
        except struct.error as error:
            raise OverflowError(str(error)) from error
        return _array(array_oid, element_oid, packed)
    interleaved = chain.from_iterable(zip(repeat(size), values))
    try:
        body = struct.pack("!" + f"i{code}" * len(values), *interleaved)
    except struct.error as error:
        raise OverflowError(str(error)) from error
    return Array(array_oid, _header(element_oid, len(values)) + body)


def _array(array_oid: int, element_oid: int, elements: Sequence[bytes | None]) -> Array:
    count = len(elements)
    if elements.count(None) == count:
        return Array(array_oid, _header(element_oid, count) + _NULL * count)
    parts = [_header(element_oid, count)]
    for element in elements:
        parts += (_NULL,) if element is None else (_length(len(element)), element)
    return Array(array_oid, b"".join(parts))


def _header(element_oid: int, count: int) -> bytes:
    """Return the head of a one-dimensional array, or the whole of an empty one."""
    if not count:
        return struct.pack("!iiI", 0, 0, element_oid)
    return struct.pack("!iiIii", 1, 1, element_oid, count, 1)


class _ArrayDumper(Dumper):
    """Hands an encoded array to libpq as it is."""

    format = Format.BINARY

    def dump(self, obj: Array) -> Buffer:
        return obj.encoded

    def get_key(self, obj: Array, _: object) -> tuple[type, int]:  # type: ignore[override]
        return (Array, obj.oid)

    def upgrade(self, obj: Array, _: object) -> "Dumper":
        dumper = type(self)(Array)
        dumper.oid = obj.oid
        return dumper


psycopg.adapters.register_dumper(Array, _ArrayDumper)
