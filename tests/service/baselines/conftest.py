"""Where the real reward tables are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED_DATA = Path(os.environ.get("YORO_SHARED_DATA", Path(__file__).parents[4] / "shared/data"))


@pytest.fixture(scope="session")
def shared_tables() -> Path:
    """Real multi-rollout tables, where this checkout stands beside them."""
    folder = SHARED_DATA / "multirollout"
    if not folder.is_dir():
        pytest.skip(f"no real reward tables at {folder}; set YORO_SHARED_DATA")
    return folder
