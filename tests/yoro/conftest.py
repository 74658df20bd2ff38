"""Verbs run in this process, against a real server over the test's database."""

import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from sqlalchemy import Engine

from service import keys
from service.api.app import create_app
from service.database.engine import transaction
from service.settings import Settings


@pytest.fixture
def served(engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server over the test's database, which the environment points the command to."""
    with transaction(engine) as connection:
        monkeypatch.setenv("YORO_API_KEY", keys.mint(connection, "ops", ["admin"]))
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("YORO_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("YORO_DATABASE_URL", settings.database_url)
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield
    server.should_exit = True
    thread.join()
    listener.close()
