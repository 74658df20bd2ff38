"""`yoro up` as its environment tells it; what it runs is tested end to end (tests/end_to_end)."""

import os
import socket
import subprocess
import sys
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


def test_an_api_stays_on_the_core_that_settings_name() -> None:
    """In a process of its own: the test's threads are to go where they like."""
    core = max(os.sched_getaffinity(0))
    script = (
        "import os; from yoro.cli import processes; processes._stay_on_core(); print(os.sched_getaffinity(0))"
    )
    for named, expected in ((str(core), {core}), ("", os.sched_getaffinity(0))):
        environment = os.environ | ({"YORO_API_CORE": named} if named else {})
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{expected}\n", done.stderr


def test_a_core_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YORO_API_CORE", "99999")
    done = run("api")
    assert done.exit_code == 2
    assert "YORO_API_CORE=99999: this process may run on" in " ".join(done.stderr.split())
