"""`yoro pull --watch`: follow a pointer both ways, and run a command on each version it comes to.

Invariants: the command runs after `current` points at the version, one at a time, and its failure stops
nothing; when the pointer goes to 0, the base model, `current` goes away and the command runs too.
"""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from yoro import retries
from yoro.client import Client
from yoro.pull import point_at, pull_version
from yoro.retries import ApiError
from yoro.signature import PullError, VerifyKey

POLL_SECONDS = 30.0


def follow(
    client: Client,
    policy: str,
    into: Path,
    which: str,
    *,
    verify_key: VerifyKey | None = None,
    arrived: Callable[[int, Path | None], None],
    failed: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Pull whatever the pointer comes to, until `stop`. Raises ApiError where asking again is no use."""
    at: int | None = None
    attempt = 0
    while not stop():
        try:
            at = _next(client, policy, into, which, at=at, verify_key=verify_key, arrived=arrived)
            attempt = 0
        except (PullError, httpx.TransportError, OSError) as error:
            failed(str(error))
        except ApiError as error:
            if error.status in (401, 403):
                raise
            failed(str(error))
        else:
            continue
        time.sleep(retries.backoff(attempt))
        attempt += 1


def _next(
    client: Client,
    policy: str,
    into: Path,
    which: str,
    *,
    at: int | None,
    verify_key: VerifyKey | None,
    arrived: Callable[[int, Path | None], None],
) -> int | None:
    """Wait for the pointer to leave `at`; bring what it points to. Return where we are then."""
    manifest = client.await_adapter(policy, which, unless=at, seconds=POLL_SECONDS)
    if manifest is None:
        return at
    version = int(manifest["version"])
    if version == at:
        return at
    folder = pull_version(client, policy, into, manifest, verify_key) if version else None
    into.mkdir(parents=True, exist_ok=True)
    point_at(into, folder.name if folder is not None else None)
    arrived(version, folder)
    return version


def run(command: Sequence[str], policy: str, version: int, folder: Path | None) -> int:
    """Run a command, `{policy}`, `{version}` and `{folder}` in it filled in; return its exit code."""
    place = str(folder.resolve()) if folder is not None else ""
    filled = [
        word.replace("{policy}", policy).replace("{version}", str(version)).replace("{folder}", place)
        for word in command
    ]
    try:
        return subprocess.run(filled, check=False).returncode  # noqa: S603 - the user's own command
    except OSError:
        return os.EX_UNAVAILABLE
