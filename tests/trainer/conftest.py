"""A tiny policy, loaded afresh for each test from one folder."""

from pathlib import Path

import pytest

from service.policies import BaseModelSource, PolicySettings
from tests.tiny_model import write_tiny_model
from tests.trainer.batches import TINY, shake
from trainer.policy import PolicyModel, load_policy


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, read-only."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_source(tiny_folder: Path) -> BaseModelSource:
    return BaseModelSource("folder", "tiny", str(tiny_folder))


@pytest.fixture
def settings() -> PolicySettings:
    return TINY


@pytest.fixture
def policy(tiny_source: BaseModelSource, settings: PolicySettings) -> PolicyModel:
    """Version 0 in fp32, with the adapter shaken so that it differs from the base."""
    loaded = load_policy(tiny_source, settings, device="cpu")
    shake(loaded)
    return loaded
