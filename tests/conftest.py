"""One real Postgres a run, one database a test, made by Alembic; the API over it in process.

`YORO_TEST_PG=15` takes Debian's PostgreSQL 15 instead of the embedded one.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine

from service import keys
from service.api.app import create_app
from service.database import engine as database
from service.database import migrate, policies
from service.database.embedded import EmbeddedPostgres
from service.database.engine import transaction
from service.policies import PolicySettings
from service.settings import Settings
from tests.databases import TEMPLATE, fresh_database


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A server with a migrated template database; fsync off, since only tests' data is at stake."""
    release = os.environ.get("YORO_TEST_PG", "")
    bin_dir = Path(f"/usr/lib/postgresql/{release}/bin") if release else None
    if bin_dir is not None and not bin_dir.exists():
        pytest.fail(f"PostgreSQL {release} is not installed")
    # Not below pytest's own folder: another session's start closes that to Postgres' account.
    folder = tempfile.TemporaryDirectory(prefix="yoro-test-")
    server = EmbeddedPostgres(
        Path(folder.name) / "data", bin_dir=bin_dir,
        options=(
            "-c", "fsync=off", "-c", "max_connections=200", "-c", "full_page_writes=off",
            "-c", "autovacuum=off",
        ),
    )  # fmt: skip
    template = database.connect(server.url(TEMPLATE), name="template")
    migrate.upgrade(template)
    template.dispose()
    yield server
    server.stop()
    folder.cleanup()


@pytest.fixture
def database_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """URL of a fresh database with the schema."""
    with fresh_database(postgres) as url:
        yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """Connections to the test's database."""
    made = database.connect(database_url, name="test", pool_size=10)
    yield made
    made.dispose()


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    """Server settings over the test's database and folder."""
    return Settings(database_url=database_url, data=tmp_path / "data")


@dataclass(frozen=True)
class Policy:
    """A policy of the test's database."""

    id: int
    name: str
    settings: PolicySettings


MakePolicy = Callable[..., Policy]


@pytest.fixture
def make_policy(engine: Engine) -> MakePolicy:
    """Create policies: `make_policy("support", batching={"size": 4})`."""

    def make(name: str = "support", **changes: Any) -> Policy:
        settings = PolicySettings.model_validate({"base_model": "smollm2-135m", **changes})
        with transaction(engine) as connection:
            return Policy(policies.create(connection, name, settings), name, settings)

    return make


@dataclass(frozen=True)
class Api:
    """The API in process, with keys of each role."""

    client: TestClient
    keys: dict[str, str]

    def call(self, role: str, method: str, path: str, **request: Any) -> Any:
        """Make a request with the key of a role."""
        headers = {"Authorization": f"Bearer {self.keys[role]}", **request.pop("headers", {})}
        return self.client.request(method, path, headers=headers, **request)

    def post_trace(self, document: dict[str, Any]) -> Any:
        """Post a trace as an agent."""
        return self.call("agent", "POST", "/v1/traces", json=document)

    def post_reward(self, document: dict[str, Any]) -> Any:
        """Post a grade as a grader."""
        return self.call("grader", "POST", "/v1/rewards", json=document)


@pytest.fixture
def api(engine: Engine, settings: Settings) -> Iterator[Api]:
    """The API over the test's database."""
    with transaction(engine) as connection:
        minted = {role: keys.mint(connection, role, [role]) for role in keys.ROLES}
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield Api(client, minted)
