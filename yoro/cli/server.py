"""The database of the server that a verb runs on: yours, or the embedded one of a `yoro up`, running or not.

Invariant: an embedded Postgres is started only while no `yoro up` has the folder, and stopped again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine

from service.settings import Settings


@contextmanager
def server(
    name: str, database_url: str | None, data: Path, *, stopped: bool = False
) -> Iterator[tuple[Engine, Settings]]:
    """Connect to this server's database. `stopped`: no `yoro up` may run. Raises Conflict, Unavailable."""
    from service.database import engine as database

    settings = Settings(data=data)
    with _url(settings, database_url, stopped=stopped) as url:
        engine = database.connect(url, name=name)
        try:
            yield engine, settings
        finally:
            engine.dispose()


@contextmanager
def _url(settings: Settings, database_url: str | None, *, stopped: bool) -> Iterator[str]:
    folder = settings.data / "postgres"
    if database_url is not None or not (folder / "PG_VERSION").exists():
        yield database_url or settings.database_url
        return
    from service.database.embedded import EmbeddedPostgres, url_of_running
    from service.errors import Conflict
    from yoro.supervisor import lock_folder

    try:
        lock = lock_folder(settings.data)
    except Conflict:
        if stopped:
            raise
        yield url_of_running(folder)
        return
    with lock:
        postgres = EmbeddedPostgres(folder)
        try:
            yield postgres.url()
        finally:
            postgres.stop()
