"""Databases of the tests' Postgres, and what happens in them."""

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from service.database.embedded import EmbeddedPostgres
from service.database.engine import transaction

TEMPLATE = "yoro"
_numbers = itertools.count()


@contextmanager
def fresh_database(postgres: EmbeddedPostgres, template: str = TEMPLATE) -> Iterator[str]:
    """URL of a new database, a copy of `template` (the empty schema), for as long as the block runs."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    admin = create_engine(postgres.url("postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield postgres.url(name)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@contextmanager
def unreachable(url: str) -> Iterator[None]:
    """Cut every connection to a database and take no new ones while the block runs."""
    address = make_url(url)
    admin = create_engine(address.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {address.database} ALLOW_CONNECTIONS false"))
        cut = connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"),
            {"name": address.database},
        ).all()
        assert cut
        yield
        connection.execute(text(f"ALTER DATABASE {address.database} ALLOW_CONNECTIONS true"))
    admin.dispose()


def await_blocked(engine: Engine) -> None:
    """Return once a session waits for another's lock."""
    for _ in range(3000):
        with transaction(engine) as connection:
            blocked = connection.execute(
                text("SELECT count(*) FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0")
            ).scalar_one()
        if blocked:
            return
        threading.Event().wait(0.01)
    pytest.fail("nobody was blocked")
