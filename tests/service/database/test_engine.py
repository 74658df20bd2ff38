"""Connections: those that died at rest are replaced, and plans look up by key whatever the size."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from service.database import engine as database
from service.database.engine import transaction
from service.errors import Unavailable


@pytest.fixture
def pool(database_url: str) -> Iterator[Engine]:
    """An engine of one connection."""
    made = database.connect(database_url, name="pooled", pool_size=1)
    yield made
    made.dispose()


def backend(pool: Engine) -> int:
    with transaction(pool) as connection:
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


def kill(engine: Engine, pid: int) -> None:
    with transaction(engine) as connection:
        assert connection.execute(text("SELECT pg_terminate_backend(:pid, 30000)"), {"pid": pid}).scalar_one()


def test_a_connection_that_died_at_rest_is_replaced_unnoticed(
    pool: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "FRESH_SECONDS", 0.0)  # whatever was given back has rested
    before = backend(pool)
    kill(engine, before)
    assert backend(pool) != before


def test_a_connection_that_died_just_after_its_use_fails_once(pool: Engine, engine: Engine) -> None:
    kill(engine, backend(pool))
    with pytest.raises(Unavailable):
        backend(pool)
    assert backend(pool)


def test_by_key_a_small_table_is_not_read_whole(database_url: str) -> None:
    plans = {}
    for by_key in (False, True):
        made = database.connect(database_url, name="planner", by_key=by_key)
        with transaction(made) as connection:
            connection.execute(text("ANALYZE policies"))
            rows = connection.execute(text("EXPLAIN SELECT name FROM policies WHERE id = 1")).scalars()
            plans[by_key] = "\n".join(rows)
        made.dispose()
    assert "Seq Scan" in plans[False]
    assert "Index Scan" in plans[True]
