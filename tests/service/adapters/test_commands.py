"""The commands of ops over a real server: list, show, diff, promote, rollback, pin, pull, serve-sync, gc."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from service import keys
from service.api.app import create_app
from service.database.engine import transaction
from service.settings import Settings
from tests.service.adapters.fake_servers import FakeServer
from tests.service.adapters.lineage import NAME, Lineage
from yoro.cli import app

Run = Callable[..., Result]


@pytest.fixture
def yoro(
    engine: Engine, settings: Settings, lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """The command, told by its environment where server, database and store are."""
    lineage.step(), lineage.step()
    with transaction(engine) as connection:
        key = keys.mint(connection, "ops", ["ops"])
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("YORO_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("YORO_API_KEY", key)
    monkeypatch.setenv("YORO_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("YORO_ADAPTERS_URL", settings.store_url)
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()

    def run(*arguments: str) -> Result:
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))

    yield run
    server.should_exit = True
    thread.join()
    listener.close()


def test_ops_live_with_versions_by_command(yoro: Run, lineage: Lineage, tmp_path: Path) -> None:
    listed = yoro("adapters", "list", NAME).stdout
    assert "latest, promoted" in listed
    assert json.loads(yoro("adapters", "show", NAME, "1").stdout)["version"] == 1
    assert "files.adapter_model.safetensors.sha256" in yoro("adapters", "diff", NAME, "1", "2").stdout
    assert yoro("adapters", "pin", NAME, "1").exit_code == 0
    assert json.loads(yoro("adapters", "rollback", NAME, "1", "--note", "worse").stdout)["before"] == 2
    assert lineage.row().promoted_version == 1
    assert yoro("adapters", "promote", NAME, "2").exit_code == 0
    assert yoro("adapters", "rollback", NAME, "1", "--rewind-trainer").exit_code == 0
    assert lineage.row().head_version == 1
    assert "rewound" in yoro("adapters", "list", NAME).stdout
    assert yoro("adapters", "promote", NAME, "9").exit_code != 0
    pulled = yoro("pull", NAME, "--into", str(tmp_path / "into"), "--version", "promoted")
    assert pulled.stdout.strip().endswith(f"{NAME}-v1")
    assert yoro("adapters", "gc", "--dry-run").exit_code == 0
    assert "the next version is 3" in yoro("adapters", "recover").stdout


def test_serve_sync_brings_every_replica_to_the_promoted_version(yoro: Run, tmp_path: Path) -> None:
    servers = [FakeServer("vllm"), FakeServer("sglang")]
    into = str(tmp_path / "into")
    done = yoro(
        "serve-sync", NAME, "--vllm", servers[0].url, "--sglang", servers[1].url, "--into", into, "--once"
    )
    assert done.exit_code != 0  # the fakes' base has three tokens, this lineage's probe two
    report = json.loads((tmp_path / "into" / "serving.json").read_text())
    assert [each["ready"] for each in report["replicas"]] == [False, False]
    assert report["name"] is None  # nobody is told to use what is not ready
    assert [each.engine.loads for each in servers] == [[f"{NAME}-v2"], [f"{NAME}-v2"]]
    for each in servers:
        each.close()


def test_a_key_pair_is_made_once(yoro: Run, tmp_path: Path) -> None:
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    assert yoro("adapters", "keygen", str(private), str(public)).exit_code == 0
    assert private.stat().st_mode & 0o777 == 0o600
    assert yoro("adapters", "keygen", str(private), str(public)).exit_code != 0
