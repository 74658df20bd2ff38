"""`yoro pull` against a server that breaks off, lies and moves its pointer; a client killed at any byte."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from service.adapters import signing
from yoro import signature
from yoro.client import Client
from yoro.following import follow
from yoro.pull import PullError, is_whole, point_at, pull, remove_older
from yoro.signature import BadSignature, load_verify_key

FILES = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": bytes(range(256)) * 400}


def manifest(version: int, **changes: Any) -> dict[str, Any]:
    entries = [
        {"name": name, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        for name, body in bodies(version).items()
    ]
    return {"schema_version": 1, "policy": "support", "version": version, "files": entries, **changes}


def bodies(version: int) -> dict[str, bytes]:
    return {name: body + str(version).encode() for name, body in FILES.items()}


class Server(ThreadingHTTPServer):
    """The adapter routes, wire-true, with faults to order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pointer, self.moved = 1, threading.Condition()
        self.manifests: dict[int, dict[str, Any]] = {}
        self.cut_after: int | None = None
        """Bytes of a body after which the connection is cut."""
        self.cuts_left = 0
        self.flip = False
        self.ignore_ranges = False
        self.unavailable = 0
        self.ranges: list[str] = []
        self.paced: threading.Event | None = None
        """Bodies come only until here, then wait."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def point(self, version: int) -> None:
        with self.moved:
            self.pointer = version
            self.moved.notify_all()


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        parts = path.split("/")
        if len(parts) == 6:
            self._manifest(parts[5], dict(each.split("=") for each in query.split("&") if each))
        else:
            self._file(int(parts[5]), parts[7])

    def _manifest(self, which: str, query: dict[str, str]) -> None:
        server = self.server
        with server.moved:
            if "unless" in query:
                server.moved.wait_for(lambda: server.pointer != int(query["unless"]), float(query["wait"]))
            version = int(which) if which.isdecimal() else server.pointer
        if version == int(query.get("unless", -1)):
            self.send_response(304)
            self.end_headers()
            return
        body = json.dumps(server.manifests.get(version) or manifest(version)).encode()
        self._answer(200, body)

    def _file(self, version: int, name: str) -> None:
        server = self.server
        body, status = bodies(version)[name], 200
        if server.flip:
            body = bytes([body[0] ^ 1]) + body[1:]
        if server.unavailable:
            server.unavailable -= 1
            self._answer(503, b"{}")
            return
        if wanted := self.headers.get("Range"):
            server.ranges.append(wanted)
            if not server.ignore_ranges:
                body, status = body[int(wanted[6:-1]) :], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.cuts_left and server.cut_after is not None and len(body) > server.cut_after:
            server.cuts_left -= 1
            self.wfile.write(body[: server.cut_after])
            self.close_connection = True
            return
        half = len(body) // 2 if server.paced else len(body)
        self.wfile.write(body[:half])
        self.wfile.flush()
        if server.paced:
            server.paced.wait(20)
        self.wfile.write(body[half:])

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made


def check_whole(into: Path, version: int) -> None:
    folder = into / "current"
    assert folder.resolve().name == f"support-v{version}"
    for name, body in bodies(version).items():
        assert (folder / name).read_bytes() == body


def test_a_file_cut_off_again_and_again_is_resumed_by_range(
    server: Server, client: Client, tmp_path: Path
) -> None:
    server.cut_after, server.cuts_left = 30_000, 3
    pull(client, "support", tmp_path)
    check_whole(tmp_path, 1)
    assert server.ranges == ["bytes=30000-", "bytes=60000-", "bytes=90000-"]


def test_a_proxy_that_answers_a_range_with_the_whole_is_understood(
    server: Server, client: Client, tmp_path: Path
) -> None:
    server.cut_after, server.cuts_left, server.ignore_ranges = 30_000, 1, True
    pull(client, "support", tmp_path)
    check_whole(tmp_path, 1)


def test_a_server_that_is_briefly_away_is_asked_again(server: Server, client: Client, tmp_path: Path) -> None:
    server.unavailable = 2
    pull(client, "support", tmp_path)
    check_whole(tmp_path, 1)


def test_a_damaged_part_of_an_earlier_pull_is_thrown_away(
    server: Server, client: Client, tmp_path: Path
) -> None:
    partial = tmp_path / ".support-v1.partial"
    partial.mkdir()
    (partial / "adapter_model.safetensors").write_bytes(b"not what it was")
    (partial / "left-over").write_bytes(b"x")
    pull(client, "support", tmp_path)
    check_whole(tmp_path, 1)
    assert sorted(path.name for path in (tmp_path / "support-v1").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "manifest.json",
    ]  # fmt: skip


def test_wrong_bytes_are_refused_and_the_old_version_stays(
    server: Server, client: Client, tmp_path: Path
) -> None:
    pull(client, "support", tmp_path)
    server.pointer, server.flip = 2, True
    with pytest.raises(PullError, match="sha256"):
        pull(client, "support", tmp_path)
    check_whole(tmp_path, 1)


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "manifest.json", ".."])
def test_a_manifest_cannot_name_a_file_outside_its_folder(
    name: str, server: Server, client: Client, tmp_path: Path
) -> None:
    server.manifests[1] = manifest(1, files=[{"name": name, "size": 1, "sha256": "00"}])
    with pytest.raises(PullError, match="outside"):
        pull(client, "support", tmp_path / "into")
    assert not (tmp_path / "evil").exists()


def test_another_version_than_asked_for_is_refused(server: Server, client: Client, tmp_path: Path) -> None:
    server.manifests[1] = manifest(2)
    with pytest.raises(PullError, match="version 2 came"):
        pull(client, "support", tmp_path, "1")


PULL = """
import sys
from pathlib import Path
from yoro.client import Client
from yoro.pull import pull
pull(Client(sys.argv[1]), "support", Path(sys.argv[2]))
"""


def test_a_client_killed_midway_leaves_the_old_version_and_the_next_goes_on(
    server: Server, client: Client, tmp_path: Path
) -> None:
    pull(client, "support", tmp_path)
    server.pointer, server.paced = 2, threading.Event()
    process = subprocess.Popen([sys.executable, "-c", PULL, server.url, str(tmp_path)])
    part = tmp_path / ".support-v2.partial" / "adapter_config.json"
    for _ in range(3000):
        if part.exists():
            break
        threading.Event().wait(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    check_whole(tmp_path, 1)
    server.paced.set()
    server.paced = None
    pull(client, "support", tmp_path)
    check_whole(tmp_path, 2)


class Followed:
    """What a follower came to; ends it after so many versions."""

    def __init__(self, ends_after: int) -> None:
        self.versions: list[int] = []
        self.failures: list[str] = []
        self._left = ends_after
        self.came = threading.Condition()

    def arrived(self, version: int, _: Path | None) -> None:
        with self.came:
            self.versions.append(version)
            self.came.notify_all()

    def stop(self) -> bool:
        return len(self.versions) >= self._left

    def wait(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.versions) >= count, 20), self.versions


def test_a_watch_follows_the_pointer_up_down_and_to_the_base(
    server: Server, client: Client, tmp_path: Path
) -> None:
    seen = Followed(4)
    thread = threading.Thread(
        target=lambda: follow(
            client, "support", tmp_path, "latest",
            arrived=seen.arrived, failed=seen.failures.append, stop=seen.stop,
        )
    )  # fmt: skip
    thread.start()
    for count, version in enumerate((3, 2, 0, 5), start=2):
        seen.wait(count - 1)
        if seen.versions[-1] == 0:
            assert not (tmp_path / "current").is_symlink()
        else:
            check_whole(tmp_path, seen.versions[-1])
        server.point(version)
    thread.join(20)
    assert seen.versions == [1, 3, 2, 0]
    assert seen.failures == []


def test_a_watch_outlives_a_bad_version(server: Server, client: Client, tmp_path: Path) -> None:
    server.manifests[1] = manifest(1, files=[{"name": "../x", "size": 1, "sha256": "00"}])
    seen = Followed(1)

    def failed(message: str) -> None:
        seen.failures.append(message)
        server.point(2)

    follow(client, "support", tmp_path, "latest", arrived=seen.arrived, failed=failed, stop=seen.stop)
    assert seen.versions == [2]
    assert "outside" in seen.failures[0]


@pytest.fixture
def keys(tmp_path: Path) -> tuple[signing.Signer, signature.VerifyKey]:
    private, public = signing.make_key()
    (tmp_path / "private.pem").write_bytes(private)
    (tmp_path / "public.pem").write_bytes(public)
    return signing.load_signer(tmp_path / "private.pem"), load_verify_key(tmp_path / "public.pem")


Keys = tuple[signing.Signer, signature.VerifyKey]


def signed(signer: signing.Signer, version: int) -> dict[str, Any]:
    document = manifest(version)
    return document | {"signature": signer.sign(document), "tainted": [], "created_at": "2026-11-29"}


def test_a_signed_version_is_pulled(server: Server, client: Client, tmp_path: Path, keys: Keys) -> None:
    server.manifests[1] = signed(keys[0], 1)
    pull(client, "support", tmp_path / "into", verify_key=keys[1])
    check_whole(tmp_path / "into", 1)


@pytest.mark.parametrize("forgery", ["unsigned", "other version", "other file", "other key", "garbage"])
def test_a_version_that_the_key_did_not_sign_is_refused(
    forgery: str, server: Server, client: Client, tmp_path: Path, keys: Keys
) -> None:
    document = signed(keys[0], 1)
    (tmp_path / "other.pem").write_bytes(signing.make_key()[0])
    server.manifests[1] = {
        "unsigned": manifest(1),
        "other version": signed(keys[0], 2) | {"version": 1},
        "other file": document | {"files": [*document["files"][1:]]},
        "other key": signed(signing.load_signer(tmp_path / "other.pem"), 1),
        "garbage": document | {"signature": document["signature"] | {"value": "!"}},
    }[forgery]
    with pytest.raises(BadSignature):
        pull(client, "support", tmp_path / "into", verify_key=keys[1])
    assert not (tmp_path / "into" / "current").exists()


def test_client_and_service_agree_on_what_is_signed() -> None:
    assert signature.SIGNED == signing.SIGNED


def test_a_pulled_folder_says_what_it_is(server: Server, client: Client, tmp_path: Path) -> None:
    folder = pull(client, "support", tmp_path)
    assert is_whole(folder, json.loads((folder / "manifest.json").read_text()))


def test_what_a_pull_gave_up_on_goes_once_a_version_is_whole(
    server: Server, client: Client, tmp_path: Path
) -> None:
    given_up = tmp_path / ".support-v7.partial"
    given_up.mkdir()
    (given_up / "adapter_config.json").write_bytes(b"{")
    pull(client, "support", tmp_path)
    check_whole(tmp_path, 1)
    assert not given_up.exists()


def test_older_versions_go_but_never_the_current_one_nor_another_policy_s(
    server: Server, client: Client, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        server.pointer = version
        pull(client, "support", tmp_path)
        os.utime(tmp_path / f"support-v{version}", (version, version))
    point_at(tmp_path, "support-v1")  # rolled back
    (tmp_path / "support-v2-v1").mkdir()
    assert remove_older(tmp_path, "support", 1) == ["support-v2"]
    check_whole(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        "current", "support-v1", "support-v2-v1", "support-v3",
    ]  # fmt: skip
