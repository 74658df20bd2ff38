"""The API over one database a module: these tests use ids and policies of their own, so they may share it."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from sqlalchemy import Engine, text

from service import keys
from service.api.app import create_app
from service.database import engine as database
from service.database import policies
from service.database.embedded import EmbeddedPostgres
from service.database.engine import transaction
from service.policies import PolicySettings
from service.settings import Settings
from tests.conftest import Api
from tests.databases import fresh_database

_numbers = itertools.count()


@pytest.fixture(scope="module")
def module_database(postgres: EmbeddedPostgres) -> Iterator[str]:
    """URL of the module's database."""
    with fresh_database(postgres) as url:
        yield url


@pytest.fixture(scope="module")
def rows(module_database: str) -> Iterator[Engine]:
    """Connections to the module's database."""
    made = database.connect(module_database, name="test")
    yield made
    made.dispose()


@pytest.fixture(scope="module")
def door(rows: Engine, module_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The API in process, with a key of each role and the policy `support`."""
    folder: Path = tmp_path_factory.mktemp("door")
    with transaction(rows) as connection:
        minted = {role: keys.mint(connection, role, [role]) for role in keys.ROLES}
    make_policy(rows, "support")
    app = create_app(Settings(database_url=module_database, data=folder))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Api(client, minted)


@pytest.fixture(scope="module")
def url(module_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where an API listens, on a free port."""
    app = create_app(Settings(database_url=module_database, data=tmp_path_factory.mktemp("api")))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)


@pytest.fixture(scope="module")
def key(rows: Engine) -> str:
    """A key of every role, and the policy."""
    make_policy(rows, "support")
    with transaction(rows) as connection:
        return keys.mint(connection, "client", ["admin"])


def make_policy(rows: Engine, name: str, **settings: Any) -> int:
    """Create a policy and return its id."""
    document = PolicySettings.model_validate({"base_model": "smollm2-135m", **settings})
    with transaction(rows) as connection:
        return policies.create(connection, name, document)


def send(door: Api, path: str, body: bytes, role: str = "agent", **headers: str) -> Any:
    """Post bytes as they are."""
    return door.call(
        role, "POST", path, content=body, headers={"Content-Type": "application/json", **headers}
    )


def stored(rows: Engine, trace_id: str, policy: str = "support") -> dict[str, Any] | None:
    """Return the registry row of a trace with its documents."""
    query = """
        SELECT r.*, d.raw, d.normalised FROM rollouts r JOIN policies p ON p.id = r.policy_id
        LEFT JOIN rollout_documents d ON d.rollout_id = r.id WHERE r.trace_id = :trace AND p.name = :policy
    """
    with transaction(rows) as connection:
        row = connection.execute(text(query), {"trace": trace_id, "policy": policy}).mappings().one_or_none()
        return None if row is None else dict(row)
