"""`/v1/policies/{p}/adapters`: manifests and files of versions, for ops and pullers.

Bytes of a version never change, so its files carry their sha256 as a strong ETag and may be cached
for good; only the pointers `latest` and `promoted` move.
"""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from sqlalchemy import Connection

from service.adapters import registry
from service.adapters.registry import Pointer, Version
from service.adapters.store import MANIFEST
from service.api.context import Context, authenticate, context, permitted_policy
from service.database.engine import transaction
from service.errors import NotFound, RangeNotSatisfiable

router = APIRouter(tags=["ops"])
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_POINTERS: dict[str, Pointer] = {"latest": "latest", "promoted": "promoted"}
_NUMBER = re.compile(r"\d{1,9}")


@router.get("/v1/policies/{policy}/adapters")
def list_adapters(
    request: Request,
    policy: str,
    cursor: Annotated[int, Query(ge=0, le=2**31 - 1)] = 2**31 - 1,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> dict[str, Any]:
    """List published versions, newest first; `next_cursor` continues."""
    here, policy_id = _permitted(request, policy)
    with transaction(here.engine) as connection:
        found = registry.page(connection, policy_id, before=cursor, limit=limit)
    more = found[-1].version if len(found) == limit else None
    return {"adapters": [version.describe() for version in found], "next_cursor": more}


@router.get("/v1/policies/{policy}/adapters/{which}")
def show_adapter(request: Request, policy: str, which: str) -> Response:
    """Show the manifest of `latest`, `promoted` or a number; 304 if the ETag still holds."""
    here, policy_id = _permitted(request, policy)
    with transaction(here.engine) as connection:
        version = _find(connection, policy_id, which)
    etag = f'"{version.version}-{version.manifest_sha256 or "base"}-{len(version.tainted)}"'
    if _matches(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    return JSONResponse(version.describe(), headers={"ETag": etag, "Cache-Control": "no-cache"})


@router.get("/v1/policies/{policy}/adapters/{which}/files/{name}")
def adapter_file(request: Request, policy: str, which: str, name: str) -> Response:
    """Send one file of a version, whole or a Range of it."""
    here, policy_id = _permitted(request, policy)
    with transaction(here.engine) as connection:
        version = _find(connection, policy_id, which)
    entry = _entry(version, name)
    folder = version.folder or ""
    etag = f'"{entry["sha256"]}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "public, max-age=31536000, immutable",
    }
    if _matches(request, etag):
        return Response(status_code=304, headers=headers)
    if here.store.local_root is not None:
        # Starlette answers Range and If-Range itself, with sendfile where the server has it.
        return FileResponse(here.store.local_root / folder / name, headers=headers)
    return _streamed(here, folder, entry, headers, request.headers.get("range"))


def _permitted(request: Request, policy: str) -> tuple[Context, int]:
    caller = authenticate(request, "ops", "agent", "dashboard")
    return context(request), permitted_policy(request, caller, policy).id


def _find(connection: Connection, policy_id: int, which: str) -> Version:
    pointer = _POINTERS.get(which)
    if pointer is not None:
        return registry.by_pointer(connection, policy_id, pointer)
    if _NUMBER.fullmatch(which):
        return registry.by_number(connection, policy_id, int(which))
    raise NotFound(f"{which!r} is neither latest, promoted nor a number", code="version_not_found")


def _entry(version: Version, name: str) -> dict[str, Any]:
    """Return the manifest's entry of a file; only names that stand there are ever opened."""
    if version.folder is None:
        raise NotFound("Version 0 is the base model and has no files", code="file_not_found")
    for entry in version.manifest["files"]:
        if entry["name"] == name:
            return dict(entry)
    raise NotFound(f"Version {version.version} has no file {name!r} (see {MANIFEST})", code="file_not_found")


def _matches(request: Request, etag: str) -> bool:
    wanted = request.headers.get("if-none-match", "")
    return any(candidate.strip().removeprefix("W/") in (etag, "*") for candidate in wanted.split(","))


def _streamed(
    here: Context, folder: str, entry: dict[str, Any], headers: dict[str, str], wanted: str | None
) -> Response:
    size, start, stop, status = entry["size"], 0, entry["size"], 200
    if wanted and (match := _RANGE.fullmatch(wanted)):
        start, stop = _bounds(match.group(1), match.group(2), size)
        status = 206
        headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    headers |= {"Content-Length": str(stop - start)}
    chunks = here.store.read(folder, entry["name"], start, stop)
    return StreamingResponse(chunks, status, headers, media_type="application/octet-stream")


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    """Return [start, stop) of a Range header's one range. Raises RangeNotSatisfiable."""
    if first:
        start, stop = int(first), min(int(last) + 1 if last else size, size)
    else:
        start, stop = max(size - int(last or 0), 0), size
    if start >= stop:
        raise RangeNotSatisfiable(f"The file has {size} bytes")
    return start, stop
