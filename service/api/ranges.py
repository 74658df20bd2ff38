"""Conditional requests and byte ranges (RFC 9110), for bodies that never change.

Knows no adapters. A Range that is not one run of bytes is ignored, as the RFC allows.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from service.errors import RangeNotSatisfiable

_RANGE = re.compile(r"bytes=(\d{1,18})?-(\d{1,18})?")


def matches(request: Request, etag: str) -> bool:
    """Tell whether `If-None-Match` says that the caller has this already."""
    wanted = request.headers.get("if-none-match")
    if wanted is None:
        return False
    return any(candidate.strip().removeprefix("W/") in (etag, "*") for candidate in wanted.split(","))


def stream(
    request: Request,
    size: int,
    read: Callable[[int, int], Iterator[bytes]],
    headers: Mapping[str, str],
    media_type: str = "application/octet-stream",
) -> Response:
    """Send `read(start, stop)`, whole or the range asked for. Raises RangeNotSatisfiable."""
    start, stop, status = 0, size, 200
    sent = dict(headers)
    wanted = _RANGE.fullmatch(request.headers.get("range", ""))
    if wanted and any(wanted.groups()) and request.headers.get("if-range", sent["ETag"]) == sent["ETag"]:
        start, stop = _bounds(wanted.group(1), wanted.group(2), size)
        status = 206
        sent["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    sent["Content-Length"] = str(stop - start)
    return StreamingResponse(read(start, stop), status, sent, media_type=media_type)


def _bounds(first: str | None, last: str | None, size: int) -> tuple[int, int]:
    """Return [start, stop) of one range. Raises RangeNotSatisfiable."""
    if first:
        start, stop = int(first), min(int(last) + 1 if last else size, size)
    else:
        start, stop = max(size - int(last or 0), 0), size
    if start >= stop:
        raise RangeNotSatisfiable(f"There are {size} bytes")
    return start, stop
