"""A lineage over the test's database and folder; with `YORO_TEST_STORE=s3` (`make test-s3`) over a bucket."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from sqlalchemy import Engine

from service.adapters.store import AdapterStore
from service.settings import Settings
from tests.service.adapters.lineage import Lineage, make_lineage

_numbers = itertools.count()


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """URL of a bucket: Amazon's protocol over HTTP, by moto; `make test-s3` installs it."""
    pytest.importorskip("s3fs", reason="needs the extra yoro[s3]: make test-s3")
    server = pytest.importorskip("moto.server", reason="needs moto[server]: make test-s3").ThreadedMotoServer(
        port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture
def settings(database_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Settings:
    url = ""
    if os.environ.get("YORO_TEST_STORE") == "s3":
        url = f"{request.getfixturevalue('bucket')}/store-{next(_numbers)}"
    return Settings(database_url=database_url, data=tmp_path / "data", adapters_url=url)


@pytest.fixture
def store(settings: Settings) -> AdapterStore:
    return AdapterStore(settings.store_url)


@pytest.fixture
def lineage(engine: Engine, store: AdapterStore, tmp_path: Path) -> Lineage:
    return make_lineage(engine, store, tmp_path / "sources")
