"""A lineage over the test's database and folder."""

from pathlib import Path

import pytest
from sqlalchemy import Engine

from service.adapters.store import AdapterStore
from service.settings import Settings
from tests.service.adapters.lineage import Lineage, make_lineage


@pytest.fixture
def store(settings: Settings) -> AdapterStore:
    return AdapterStore(settings.store_url)


@pytest.fixture
def lineage(engine: Engine, store: AdapterStore, tmp_path: Path) -> Lineage:
    return make_lineage(engine, store, tmp_path / "sources")
