"""The api process: routes, errors, and what lives as long as it does.

Composition only. Closing writes out what is queued before the process ends.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from sqlalchemy import Engine, text

from service.adapters.store import AdapterStore
from service.api import adapters, keys, policies, problems, rewards, status, traces
from service.api.context import Context
from service.api.directory import Directory
from service.database import engine as database
from service.database.engine import transaction
from service.ingest.group_commit import GroupCommit
from service.ingest.writer import Writer
from service.schemas import Grade, Trace
from service.settings import Settings

_BODIES: dict[str, type[BaseModel]] = {"/v1/traces": Trace, "/v1/rewards": Grade}
"""Routes that read their body themselves, under caps; the OpenAPI document still shows its type."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the app; connections open when it starts."""
    settings = settings or Settings()
    app = FastAPI(title="yoro", version="0.1.0", lifespan=_lifespan, docs_url="/docs")
    app.state.settings = settings
    for module in (traces, rewards, policies, adapters, status, keys):
        app.include_router(module.router)
    app.include_router(status.probes)
    problems.install(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    engine = database.connect(settings.database_url, name="api", pool_size=8)
    directory = Directory(engine)
    directory.start()
    writes = GroupCommit(
        Writer(engine), max_items=settings.limits.queue_items, max_bytes=settings.limits.queue_bytes
    )
    app.state.context = Context(
        settings,
        engine,
        directory,
        writes,
        AdapterStore(settings.store_url),
        _fingerprint_key(engine),
    )
    try:
        yield
    finally:
        writes.close()
        directory.close()
        engine.dispose()


def _fingerprint_key(engine: Engine) -> bytes:
    with transaction(engine) as connection:
        found = connection.execute(text("SELECT value FROM secrets WHERE name = 'fingerprint'")).scalar_one()
        return bytes(found)


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, shared = models_json_schema(
        [(model, "validation") for model in _BODIES.values()],
        ref_template="#/components/schemas/{model}",
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(shared["$defs"])
    for path, model in _BODIES.items():
        reference = {"$ref": f"#/components/schemas/{model.__name__}"}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    app.openapi_schema = document
    return document
