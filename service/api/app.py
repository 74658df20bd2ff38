"""The api process: routes, errors, and what lives as long as it does.

Composition only. Closing writes out what is queued before the process ends.
"""

import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from sqlalchemy import Engine, event

from service.adapters.store import AdapterStore
from service.api import (
    adapters,
    baselines,
    dead_letters,
    graders,
    keys,
    policies,
    problems,
    promotion,
    rewards,
    status,
    stories,
    traces,
    versions,
    webhooks,
)
from service.api.admission import InFlight
from service.api.bodies import JSON, NDJSON
from service.api.context import Context
from service.api.direct import DirectApp
from service.api.directory import Directory
from service.api.pointer_watch import PointerWatch
from service.database import engine as database
from service.database.secrets import fingerprint_key
from service.ingest.group_commit import GroupCommit
from service.ingest.intake import Intake
from service.ingest.masking import load_functions
from service.ingest.writer import Writer
from service.schemas import Grade, GradeBatch, Trace, TraceBatch
from service.settings import Settings

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/traces": Trace,
    "/v1/traces/batch": TraceBatch,
    "/v1/rewards": Grade,
    "/v1/rewards/batch": GradeBatch,
}
"""Routes that read their body themselves, under caps; the OpenAPI document still shows its type."""


_DIRECT = {
    "/v1/traces": traces.post_trace,
    "/v1/traces/batch": traces.post_traces,
    "/v1/rewards": rewards.post_reward,
    "/v1/rewards/batch": rewards.post_rewards,
}
SWITCH_SECONDS = 0.0005
"""How long one thread may keep the interpreter while another waits: Python's 5 ms, at each of a commit's
answers from the database, would be most of a request's time."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the app; connections open when it starts."""
    settings = settings or Settings()
    app = DirectApp(title="yoro", version="0.1.0", lifespan=_lifespan, docs_url="/docs")
    app.direct = _DIRECT
    app.state.settings = settings
    for module in (
        traces,
        rewards,
        policies,
        adapters,
        promotion,
        baselines,
        status,
        keys,
        stories,
        graders,
        versions,
        webhooks,
        dead_letters,
    ):
        app.include_router(module.router)
    app.include_router(status.probes)
    problems.install(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    sys.setswitchinterval(SWITCH_SECONDS)
    engine = database.connect(settings.database_url, name="api", pool_size=8)
    writing = database.connect(settings.database_url, name="intake", pool_size=settings.writers, by_key=True)
    for pool in (engine, writing):
        _bound_statements(pool, settings.statement_seconds)
    directory = Directory(engine, load_functions(settings.mask_functions))
    directory.start()
    pointers = PointerWatch(engine)
    pointers.start()
    writes = GroupCommit(
        Writer(writing),
        max_items=settings.limits.queue_items,
        max_bytes=settings.limits.queue_bytes,
        threads=settings.writers,
    )
    app.state.context = Context(
        settings,
        engine,
        directory,
        writes,
        AdapterStore(settings.store_url),
        pointers,
        Intake(settings.limits, fingerprint_key(engine)),
        InFlight(settings.limits.in_flight_bytes),
    )
    # What the imports made lives as long as the process: no collection needs to walk it again.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        writes.close()
        writing.dispose()
        pointers.close()
        directory.close()
        engine.dispose()


def _bound_statements(engine: Engine, seconds: float) -> None:
    """End statements that take too long: a request that waits for them is answered 503."""

    @event.listens_for(engine, "connect")
    def _bound(connection: Any, _: object) -> None:
        connection.autocommit = True
        connection.execute(f"SET statement_timeout = {int(seconds * 1000)}")
        connection.autocommit = False


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
        content = {JSON: {"schema": reference}}
        if path.endswith("/batch"):
            content[NDJSON] = {"schema": {"type": "string"}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    app.openapi_schema = document
    return document
