"""One model folder for all workers."""

from pathlib import Path

import pytest

from tests.faults import worker_process


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which the tiny model lies."""
    return worker_process.tiny_model_root(tmp_path_factory.mktemp("models"))
