"""Hooks: an endpoint is reached only at public addresses, a command only from the server's settings."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from service.adapters import hooks
from service.adapters.hooks import HookFailed, ask_url, is_public, public_address, run_command


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "224.0.0.1",  # noqa: S104
        "100.64.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "2002:7f00:1::", "64:ff9b::7f00:1", "ff02::1", "255.255.255.255",
    ],
)  # fmt: skip
def test_addresses_inside_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "0x7f.1", "2130706433", "127.1", "[::1]".strip("[]"), "no.such.invalid"],
)
def test_a_host_that_leads_inside_is_refused(host: str) -> None:
    with pytest.raises(HookFailed):
        public_address(host, 80)


class Hook(BaseHTTPRequestHandler):
    """Answers what its server is told to."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        server: Any = self.server
        server.got = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.host_header = self.headers["Host"]
        status, headers, body = server.reply
        if status == 0:
            server.never.wait(20)
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def endpoint() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Hook)
    server.reply, server.never = (200, {}, b'{"pass": true, "metrics": {"exact": 0.5}}'), threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.never.set()
    server.shutdown()
    server.server_close()


def ask(endpoint: Any, seconds: float = 5, host: str = "localhost") -> hooks.Answer:
    url = f"http://{host}:{endpoint.server_address[1]}/judge"
    return ask_url(url, {"version": 3}, seconds=seconds, hosts=(host,))


def test_an_endpoint_that_the_server_allows_is_asked_with_the_candidate(endpoint: Any) -> None:
    assert ask(endpoint) == hooks.Answer(True, "", {"exact": 0.5})
    assert endpoint.got == {"version": 3}
    assert endpoint.host_header.startswith("localhost:")


def test_the_same_endpoint_is_refused_without_that_permission(endpoint: Any) -> None:
    with pytest.raises(HookFailed, match="not a public address"):
        ask_url(f"http://localhost:{endpoint.server_address[1]}/", {}, seconds=5)


@pytest.mark.parametrize(
    "reply",
    [
        (302, {"Location": "http://169.254.169.254/"}, b""),
        (500, {}, b'{"pass": true}'),
        (200, {}, b"yes"),
        (200, {}, b'{"pass": 1}'),
        (200, {}, b"[true]"),
        (200, {}, b" " * (hooks.MOST_BYTES + 2)),
        (0, {}, b""),
    ],
)
def test_what_is_no_answer_is_no_pass(reply: Any, endpoint: Any) -> None:
    endpoint.reply = reply
    with pytest.raises(HookFailed):
        ask(endpoint, seconds=1)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_gets_the_candidate_and_answers() -> None:
    code = (
        "import json,sys; c=json.load(sys.stdin); print(json.dumps({'pass': c['version']==3, 'reason': 'x'}))"
    )
    assert run_command(python(code), {"version": 3}, seconds=20).passed
    assert not run_command(python(code), {"version": 4}, seconds=20).passed


def test_a_command_sees_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YORO_DATABASE_URL", "secret")
    code = "import os,json; print(json.dumps({'pass': 'YORO_DATABASE_URL' not in os.environ}))"
    assert run_command(python(code), {}, seconds=20).passed


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('yes')", "import time; time.sleep(60)"])
def test_a_command_that_fails_or_hangs_is_no_pass(code: str) -> None:
    with pytest.raises(HookFailed):
        run_command(python(code), {}, seconds=1)


def test_a_command_that_is_not_there_is_no_pass() -> None:
    with pytest.raises(HookFailed):
        run_command(["/no/such/command"], {}, seconds=1)
