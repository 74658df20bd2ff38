"""Asking somebody outside whether a version may serve: an HTTP endpoint, or a command of this server.

Knows no database. Invariants: an address that is not public is never connected to, unless the server's
settings name its host, and the address that was checked is the one connected to; a redirect is
no answer; nothing is waited for, or read, without a bound; a command comes from the server's settings
alone and sees none of this process's environment.
"""

import ipaddress
import json
import math
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

MOST_BYTES = 1 << 20
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""NAT64: what looks public may lead to any IPv4 address."""


class HookFailed(Exception):
    """No answer that can be read: the candidate has not passed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a hook says. Example: passed True, metrics {"exact_match": 0.31}."""

    passed: bool
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


def ask_url(url: str, document: Mapping[str, Any], *, seconds: float, hosts: Sequence[str] = ()) -> Answer:
    """Post the candidate to an endpoint. Raises HookFailed. `hosts`: those that need not be public."""
    parts = httpx.URL(url)
    address = public_address(parts.host, parts.port or (443 if parts.scheme == "https" else 80), hosts)
    target = parts.copy_with(host=address)
    headers = {"Host": parts.netloc.decode(), "Content-Type": "application/json"}
    # No proxy of the environment: it would be asked to connect where we would not.
    with httpx.Client(trust_env=False, follow_redirects=False, timeout=seconds) as client:
        request = client.build_request(
            "POST", target, content=json.dumps(document), headers=headers,
            extensions={"sni_hostname": parts.host, "timeout": httpx.Timeout(seconds).as_dict()},
        )  # fmt: skip
        try:
            reply = client.send(request, stream=True)
            body = _bounded(reply)
        except httpx.HTTPError as error:
            raise HookFailed(f"the hook did not answer: {error}") from error
    if reply.status_code != 200:
        raise HookFailed(f"the hook answered {reply.status_code}")
    return _answer(body)


def public_address(host: str, port: int, hosts: Sequence[str] = ()) -> str:
    """Return an address of a host, all of whose addresses are public. Raises HookFailed."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HookFailed(f"{host} has no address: {error}") from error
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if host not in hosts and not is_public(address):
            raise HookFailed(f"{host} is {address}, which is not a public address")
    return addresses[0]


def is_public(address: str) -> bool:
    """Tell whether an address is one of the open internet, whatever it is wrapped in."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        wrapped = found.ipv4_mapped or found.sixtofour
        if wrapped is not None:
            return is_public(str(wrapped))
        if found.teredo is not None or found in _TRANSLATED:
            return False
    return found.is_global and not found.is_multicast


def run_command(arguments: Sequence[str], document: Mapping[str, Any], *, seconds: float) -> Answer:
    """Run a command with the candidate on its standard input. Raises HookFailed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as given:
        given.write(json.dumps(document).encode())
        given.seek(0)
        try:
            process = subprocess.Popen(  # noqa: S603 - from the server's settings
                list(arguments), stdin=given, stdout=out, stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise HookFailed(f"the command did not start: {error}") from error
        code = _wait(process, seconds)
        if code != 0:
            raise HookFailed(f"the command ended with {code}")
        out.seek(0)
        return _answer(out.read(MOST_BYTES))


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired as error:
        raise HookFailed(f"the command took longer than {seconds:g} s") from error
    finally:
        # its children too, and those that outlive a command which ended by itself
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _bounded(reply: httpx.Response) -> bytes:
    body = b""
    for chunk in reply.iter_bytes():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HookFailed(f"the hook's answer is longer than {MOST_BYTES} bytes")
    return body


def _answer(body: bytes) -> Answer:
    try:
        document = json.loads(body)
    except ValueError as error:
        raise HookFailed("the answer is not JSON") from error
    if not isinstance(document, dict) or not isinstance(document.get("pass"), bool):
        raise HookFailed('the answer must be an object with "pass": true or false')
    metrics = document.get("metrics")
    kept = {
        str(name)[:200]: float(value)
        for name, value in (metrics.items() if isinstance(metrics, dict) else ())
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return Answer(document["pass"], str(document.get("reason", ""))[:500], kept)
