"""`yoro up` as a user starts it: a command in a process of its own, over a folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from yoro import Client
from yoro.ports import free_port

READY_SECONDS = 90.0


@dataclass
class Installation:
    """A running `yoro up`."""

    data: Path
    port: int
    model_root: Path
    process: "subprocess.Popen[bytes]"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Client:
        return Client(self.url, (self.data / "admin.key").read_text().strip())

    def yoro(self, *arguments: str) -> str:
        """Run a client verb against it and return what it prints."""
        return self.on_server(*arguments, "--url", self.url)

    def on_server(self, *arguments: str) -> str:
        """Run a verb on its machine, whether it is up or not, and return what that prints."""
        done = subprocess.run(
            [sys.executable, "-m", "yoro", *arguments, "--data", str(self.data)],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def family(self) -> list[psutil.Process]:
        """Every process below `yoro up`, Postgres' included."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, name: str) -> psutil.Process:
        """The child that runs a verb, or Postgres."""
        for process in psutil.Process(self.process.pid).children():
            words = process.cmdline()
            if name in words or Path(words[0]).name == name:
                return process
        raise AssertionError(f"{name} does not run")

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """Signal the command and wait for its end."""
        self.process.send_signal(sign)
        return self.process.wait(60)


def start(data: Path, model_root: Path, *options: str) -> Installation:
    """Start `yoro up` on a free port and wait until it says that it is up."""
    port = free_port()
    environment = os.environ | {"YORO_MODEL_ROOT": str(model_root), "OMP_NUM_THREADS": "1"}
    log = data.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "yoro", "up", "--data", str(data), "--port", str(port), *options],
            stdout=out, stderr=out, env=environment, start_new_session=True,
        )  # fmt: skip
    found = Installation(data, port, model_root, process)
    await_that(lambda: "yoro is up" in log.read_text() or process.poll() is not None, READY_SECONDS)
    assert process.poll() is None, log.read_text()
    return found


def await_that(holds: Callable[[], object], seconds: float = READY_SECONDS) -> None:
    """Return once `holds()`, which another process brings about; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.05)


def all_gone(processes: list[psutil.Process]) -> bool:
    """Whether none of the processes runs any more."""
    return not any(process.is_running() and process.status() != "zombie" for process in processes)
