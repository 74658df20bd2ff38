"""Connections and `transaction()`, the only place where a database commit is made.

Invariants: isolation is READ COMMITTED whatever the server's default; times are UTC;
everything between entering and leaving `transaction()` is one transaction.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, DisconnectionError, OperationalError

from service.errors import Unavailable

CONNECT_TIMEOUT_SECONDS = 5
FRESH_SECONDS = 1.0
"""A connection that rested less than this is used without asking the server first."""


def connect(
    url: str, *, name: str, pool_size: int = 5, idle_transaction_seconds: float = 0, by_key: bool = False
) -> Engine:
    """Create the engine of one process; `name` is what Postgres shows in pg_stat_activity.

    A transaction in which the process says nothing for `idle_transaction_seconds` is undone, so that a
    process that sleeps in the middle of one does not keep others from its rows; 0: never.
    `by_key`: whatever can be found by an index is, even in tables that are small now: Postgres keeps a
    prepared statement's plan while they grow, until it next analyses them.
    """
    engine = create_engine(
        url,
        pool_size=pool_size,
        max_overflow=pool_size,
        isolation_level="READ COMMITTED",
        connect_args={
            "application_name": f"yoro {name}",
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            # synchronous_commit is ours to set: an acknowledgement promises durability.
            "options": "-c timezone=UTC -c synchronous_commit=on -c jit=off"
            f" -c idle_in_transaction_session_timeout={int(idle_transaction_seconds * 1000)}"
            f" -c enable_seqscan={'off' if by_key else 'on'}",
        },
    )
    _ask_after_rest(engine)
    return engine


def _ask_after_rest(engine: Engine) -> None:
    """Replace connections that died in the pool; one used just now is not asked, which costs a round trip."""

    @event.listens_for(engine, "checkin")
    def _rests(_: Any, record: Any) -> None:
        record.info["rests_since"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _ask(raw: Any, record: Any, _: Any) -> None:
        since = record.info.get("rests_since")
        if since is None or time.monotonic() - since < FRESH_SECONDS:
            return
        try:
            engine.dialect.do_ping(raw)
        except psycopg.Error as error:
            raise DisconnectionError from error


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """Run one transaction; commit on leaving, roll back on any error.

    Raises Unavailable when the connection breaks. If that happens at commit, the outcome is
    unknown: callers either repeat an idempotent write or read back what happened.
    """
    try:
        with engine.connect() as connection:
            yield connection
            connection.commit()
    except DBAPIError as error:
        if error.connection_invalidated or isinstance(error, OperationalError):
            raise Unavailable(f"The database does not answer: {_first_line(error)}") from error
        raise


def _first_line(error: DBAPIError) -> str:
    return (str(error.orig).splitlines() or ["no message"])[0]
