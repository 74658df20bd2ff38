"""`/v1/policies/{p}/adapters`: manifests and files of versions, for ops and pullers.

Bytes of a version never change, so its files carry their sha256 as a strong ETag and may be cached
for good; only the pointers `latest` and `promoted` move, and polls of them are answered from memory.
"""

import math
import re
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse

from service import telemetry
from service.adapters import registry
from service.adapters.archive import archive
from service.adapters.registry import Pointed, Pointer, Version
from service.adapters.store import MANIFEST, StoredFile
from service.api import ranges
from service.api.context import Context, authenticate, authenticate_waiting, context, permitted_policy
from service.api.direct import DirectRoute
from service.database.engine import transaction
from service.errors import AdapterRejected, FieldError, Gone, Invalid, NotFound
from service.keys import Role

router = APIRouter(tags=["ops"])
polls = APIRouter(tags=["ops"], route_class=DirectRoute)
ROLES: tuple[Role, ...] = ("ops", "agent", "dashboard")
LONGEST_WAIT = 60.0
_POINTERS: dict[str, Pointer] = {"latest": "latest", "promoted": "promoted"}
_NUMBER = re.compile(r"\d{1,10}", re.ASCII)
_MOST = 2**31 - 1
_FOR_GOOD = "private, max-age=31536000, immutable"
"""Private: a cache that many share must not hand to anybody what needs a key."""


_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {"name": "policy", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "which", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "unless", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": _MOST}},
        {"name": "wait", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": LONGEST_WAIT}},
    ]
}
"""What FastAPI would find out by itself; its solving of parameters costs more than the answer."""


class _File(FileResponse):
    """A stored file: Starlette answers Range and If-Range; larger chunks, as each costs a thread's turn."""

    chunk_size = 1 << 20


@router.get("/v1/policies/{policy}/adapters")
def list_adapters(
    request: Request,
    policy: str,
    cursor: Annotated[int, Query(ge=0, le=2**31 - 1)] = 2**31 - 1,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> dict[str, Any]:
    """List published versions, newest first; `next_cursor` continues."""
    here, policy_id = permitted(request, policy)
    with transaction(here.engine) as connection:
        found = registry.page(connection, policy_id, before=cursor, limit=limit)
    more = found[-1].version if len(found) == limit else None
    return {"adapters": [version.describe() for version in found], "next_cursor": more}


@polls.get("/v1/policies/{policy}/adapters/{which}", openapi_extra=_PARAMETERS)
async def show_adapter(request: Request) -> Response:
    """Show the manifest of `latest`, `promoted` or a number; 304 if the ETag still holds.

    With `unless=N` it is answered as soon as the pointer is not at N, upwards or downwards; 304 after `wait`
    seconds if it still is.
    """
    policy, which = request.path_params["policy"], request.path_params["which"]
    unless, wait = _patience(request)
    here, policy_id = await _permitted_waiting(request, policy)
    pointer = _POINTERS.get(which)
    if pointer is None:
        version = await run_in_threadpool(_numbered, here, policy_id, which)
        at = Pointed(policy, version.version, version.etag)
        return _described(request, version.etag, await here.pointers.description(policy_id, at))
    found = await here.pointers.other_than(policy_id, pointer, unless, wait)
    if wait:
        await _permitted_waiting(request, policy)  # the key may have been revoked meanwhile
    if found.version == unless or ranges.matches(request, found.etag):
        return Response(status_code=304, headers={"ETag": found.etag, "Cache-Control": "no-cache"})
    return _described(request, found.etag, await here.pointers.description(policy_id, found))


@router.get("/v1/policies/{policy}/adapters/{which}/files/{name}")
def adapter_file(request: Request, policy: str, which: str, name: str) -> Response:
    """Send one file of a version, whole or a Range of it."""
    here, policy_id = permitted(request, policy)
    version = _with_files(here, policy_id, which)
    entry = _entry(version, name)
    headers = {"ETag": f'"{entry.sha256}"', "Accept-Ranges": "bytes", "Cache-Control": _FOR_GOOD}
    if ranges.matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    folder = _vouched(here, version, [entry])
    root = here.store.local_root
    if root is None:
        return ranges.stream(request, entry.size, partial(here.store.read, folder, name), headers)
    if here.settings.accel_redirect:
        place = f"{here.settings.accel_redirect.rstrip('/')}/{quote(f'{folder}/{name}')}"
        return Response(headers=headers | {"X-Accel-Redirect": place})
    if here.settings.x_sendfile:
        return Response(headers=headers | {"X-Sendfile": str(root / folder / name)})
    return _File(root / folder / name, headers=headers, media_type="application/octet-stream")


@router.get("/v1/policies/{policy}/adapters/{which}/archive")
def adapter_archive(request: Request, policy: str, which: str) -> Response:
    """Send a version as one tar, always the same bytes, whole or a Range of it."""
    here, policy_id = permitted(request, policy)
    version = _with_files(here, policy_id, which)
    headers = {
        "ETag": f'"tar1-{version.manifest_sha256}"',
        "Accept-Ranges": "bytes",
        "Cache-Control": _FOR_GOOD,
        "Content-Disposition": f'attachment; filename="{policy}-v{version.version}.tar"',
    }
    if ranges.matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    files = [StoredFile(**entry) for entry in version.manifest["files"]]
    folder = _vouched(here, version, files)
    manifest = b"".join(here.store.read(folder, MANIFEST))
    made = archive(folder, f"{policy}-v{version.version}", manifest, files)
    return ranges.stream(request, made.size, partial(made.read, here.store), headers, "application/x-tar")


def permitted(request: Request, policy: str) -> tuple[Context, int]:
    """Return the context and the policy's id. Raises what forbids the caller to see its versions."""
    caller = authenticate(request, *ROLES)
    return context(request), permitted_policy(request, caller, policy).id


async def _permitted_waiting(request: Request, policy: str) -> tuple[Context, int]:
    """As `permitted`, on the event loop: a thread is needed only for keys and policies made just now."""
    here, caller = context(request), await authenticate_waiting(request, *ROLES)
    if here.directory.known_policy(policy) is None:
        entry = await run_in_threadpool(permitted_policy, request, caller, policy)
    else:
        entry = permitted_policy(request, caller, policy)
    return here, entry.id


def _patience(request: Request) -> tuple[int, float]:
    """Return `unless`, -1 where it is not given, and `wait`. Raises Invalid."""
    if not request.scope["query_string"]:
        return -1, 0.0
    unless, wait = request.query_params.get("unless", "-1"), request.query_params.get("wait", "0")
    if unless != "-1" and not (_NUMBER.fullmatch(unless) and int(unless) <= _MOST):
        raise Invalid("", [FieldError("/query/unless", "must be a version's number")])
    try:
        seconds = float(wait)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_WAIT:
        raise Invalid("", [FieldError("/query/wait", f"must be 0 to {LONGEST_WAIT:g} seconds")])
    return int(unless), seconds


def _described(request: Request, etag: str, body: bytes) -> Response:
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if ranges.matches(request, etag):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")


def _numbered(here: Context, policy_id: int, which: str) -> Version:
    """Return a version by its number or pointer, as it is marked now."""
    with transaction(here.engine) as connection:
        if (pointer := _POINTERS.get(which)) is not None:
            return registry.by_pointer(connection, policy_id, pointer)
        if _NUMBER.fullmatch(which) and int(which) <= _MOST:
            return registry.by_number(connection, policy_id, int(which))
    raise NotFound(f"{which!r} is neither latest, promoted nor a number", code="version_not_found")


def _with_files(here: Context, policy_id: int, which: str) -> Version:
    """Return a version that has files; by number, from memory."""
    if _NUMBER.fullmatch(which) and int(which) <= _MOST:
        version = here.pointers.version(policy_id, int(which))
    else:
        version = _numbered(here, policy_id, which)
    if version.folder is None:
        raise NotFound("Version 0 is the base model and has no files", code="file_not_found")
    return version


def _entry(version: Version, name: str) -> StoredFile:
    """Return the manifest's entry of a file; only names that stand there are ever opened."""
    for entry in version.manifest["files"]:
        if entry["name"] == name:
            return StoredFile(**entry)
    raise NotFound(f"Version {version.version} has no file {name!r} (see {MANIFEST})", code="file_not_found")


def _vouched(here: Context, version: Version, files: list[StoredFile]) -> str:
    """Return the version's folder once its files are known to be whole. Raises Gone, AdapterRejected."""
    folder = version.folder or ""
    try:
        for file in files:
            here.store.vouch(folder, file)
    except NotFound as error:
        raise Gone(f"The files of version {version.version} are gone", code="version_gone") from error
    except AdapterRejected as error:
        telemetry.logger().error("stored_file_is_wrong", folder=folder, detail=error.detail)
        raise
    return folder


router.include_router(polls)
