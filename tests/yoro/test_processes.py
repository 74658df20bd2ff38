"""`yoro up` as its environment tells it; what it runs is tested end to end (tests/end_to_end)."""

import socket
from pathlib import Path

import pytest

from tests.yoro.commands import run
from yoro.supervisor import lock_folder


def test_up_takes_its_folder_from_the_environment_as_client_verbs_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YORO_DATA", str(tmp_path / "elsewhere"))
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it ends once it has locked its folder
        done = run("up", "--port", str(taken.getsockname()[1]))
    assert done.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    lock_folder(tmp_path / "elsewhere").close()  # a start that was refused holds nothing
