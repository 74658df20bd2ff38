"""Request bodies: read under a cap, inflated in a stream under another, after authentication.

Never trusts Content-Length, nor the size that a compressed frame declares.
"""

import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import zstandard
from fastapi import Request

from service.errors import Malformed, TooLarge, UnsupportedEncoding
from service.ingest.formats import jsontext
from service.settings import Limits

Inflate = Callable[[bytes, int], bytes]
_STEP = 1 << 16


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the inflated body. Raises TooLarge, Malformed or UnsupportedEncoding."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    chunks = _capped(request.stream(), limits.body_bytes)
    if encoding in ("", "identity"):
        return b"".join([chunk async for chunk in chunks])
    if encoding not in _INFLATERS:
        raise UnsupportedEncoding(f"Content-Encoding {encoding!r} is not one of gzip, zstd")
    packed = b"".join([chunk async for chunk in chunks])
    return _INFLATERS[encoding](packed, limits.inflated_bytes)


async def read_json(request: Request, limits: Limits) -> tuple[Any, bytes]:
    """Return the parsed JSON body and its bytes."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedEncoding(f"Content-Type {kind!r} is not application/json")
    body = await read_body(request, limits)
    return jsontext.parse(body, max_depth=limits.json_depth), body


async def _capped(chunks: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise TooLarge(f"The body exceeds {limit} bytes", code="body_bytes")
        yield chunk


def _gunzip(packed: bytes, limit: int) -> bytes:
    """Inflate one or more gzip members."""
    parts: list[bytes] = []
    size, rest = 0, packed
    while rest:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            try:
                part = member.decompress(rest, _STEP)
            except zlib.error as error:
                raise Malformed(f"The body is not gzip: {error}") from error
            rest = member.unconsumed_tail
            if not part and not rest and not member.eof:
                raise Malformed("The gzip body ends early")
            parts.append(part)
            size += len(part)
            _check_inflated(size, limit)
        rest = member.unused_data
    return b"".join(parts)


def _unzstd(packed: bytes, limit: int) -> bytes:
    """Inflate one or more zstd frames; what a frame's header declares is not believed."""
    parts: list[bytes] = []
    size = 0
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        packed, read_across_frames=True
    )
    try:
        while part := reader.read(_STEP):
            parts.append(part)
            size += len(part)
            _check_inflated(size, limit)
    except zstandard.ZstdError as error:
        raise Malformed(f"The body is not zstd: {error}") from error
    return b"".join(parts)


def _check_inflated(size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(f"The body inflates beyond {limit} bytes", code="inflated_bytes")


_INFLATERS: dict[str, Inflate] = {"gzip": _gunzip, "x-gzip": _gunzip, "zstd": _unzstd}
