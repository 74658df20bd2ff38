"""Request bodies: read under a cap, inflated in a stream under another, after authentication.

Never trusts Content-Length, nor the size that a compressed frame declares. What requests hold
together is bounded too: bytes are counted as they come in.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard
from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from service.api.admission import Held
from service.errors import Malformed, TooLarge, UnsupportedEncoding
from service.ingest.formats import jsontext
from service.settings import Limits

Inflate = Callable[[bytes], Iterator[bytes]]
JSON, NDJSON = "application/json", "application/x-ndjson"
_NDJSON_NAMES = (NDJSON, "application/ndjson", "application/jsonl")
_STEP = 1 << 16
SLOW_BYTES = 1 << 18
"""Bodies from here on are worked on in a thread, so that small requests are not held up."""


def content_type(request: Request, *, many: bool = False) -> str:
    """Return JSON or, where many documents may come, NDJSON. Raises UnsupportedEncoding for any other."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind == JSON or kind.endswith("+json"):
        return JSON
    if many and kind in _NDJSON_NAMES:
        return NDJSON
    known = f"{JSON} or {NDJSON}" if many else JSON
    raise UnsupportedEncoding(f"Content-Type {kind[:100]!r} is not {known}", code="content_type")


async def read_body(request: Request, limits: Limits, held: Held | None = None) -> bytes:
    """Return the inflated body. Raises TooLarge, Malformed, UnsupportedEncoding or Unavailable."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity") and encoding not in _INFLATERS:
        raise UnsupportedEncoding(f"Content-Encoding {encoding[:100]!r} is not one of gzip, zstd")
    body = await _received(request, limits.body_bytes, held)
    if encoding in ("", "identity"):
        return body
    if len(body) < _STEP:
        return _inflated(body, encoding, limits.inflated_bytes, held)
    return await run_in_threadpool(_inflated, body, encoding, limits.inflated_bytes, held)


async def read_json(request: Request, limits: Limits, held: Held | None = None) -> tuple[Any, bytes]:
    """Return the parsed JSON body and its bytes."""
    content_type(request)
    body = await read_body(request, limits, held)
    if len(body) < SLOW_BYTES:
        return jsontext.parse(body, max_depth=limits.json_depth), body
    return await run_in_threadpool(jsontext.parse, body, max_depth=limits.json_depth), body


async def _received(request: Request, limit: int, held: Held | None) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            # The rest is read and dropped, within a bound: a client still sending would see a reset.
            chunks.clear()
            if size > limit * _DROPPED:
                break
            continue
        if held is not None:
            held.add(len(chunk))
        chunks.append(chunk)
    if size > limit:
        raise TooLarge(f"The body exceeds {limit} bytes", code="body_bytes")
    return b"".join(chunks)


def _inflated(packed: bytes, encoding: str, limit: int, held: Held | None) -> bytes:
    parts: list[bytes] = []
    size = 0
    for part in _INFLATERS[encoding](packed):
        size += len(part)
        if size > limit:
            raise TooLarge(f"The body inflates beyond {limit} bytes", code="inflated_bytes")
        if held is not None:
            held.add(len(part))
        parts.append(part)
    return b"".join(parts)


def _gunzip(packed: bytes) -> Iterator[bytes]:
    """Inflate one or more gzip members, a step at a time."""
    rest = packed
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
            yield part
        rest = member.unused_data


def _unzstd(packed: bytes) -> Iterator[bytes]:
    """Inflate zstd frames, a step at a time; what a frame's header declares is not believed."""
    rest = packed
    while rest:
        frame = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj(read_across_frames=False)
        at = 0
        while at < len(rest) and not frame.eof:
            # Fed by small pieces: one piece inflates to at most a few megabytes before it is counted.
            piece = rest[at : at + _PIECE]
            at += len(piece)
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise Malformed(f"The body is not zstd: {error}") from error
        if not frame.eof:
            raise Malformed("The zstd body ends early")
        rest = frame.unused_data + rest[at:]


_PIECE = 1 << 9
_DROPPED = 4
_INFLATERS: dict[str, Inflate] = {"gzip": _gunzip, "x-gzip": _gunzip, "zstd": _unzstd}
