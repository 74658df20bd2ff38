"""Load from outside: Debian's wrk, one thread, the same script for every arm.

wrk is not ours and not Python, so neither arm's interpreter pays for making requests.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.intake.documents import encoded

_DONE = """
function done(summary, latency, requests)
  io.write(string.format(
    '\\nRESULT {"requests": %d, "seconds": %.6f, "refused": %d, "broken": %d, "p50": %.3f, "p99": %.3f}\\n',
    summary.requests, summary.duration / 1e6, summary.errors.status,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
"""
_HEADERS = """
local counter = 0
local before, after, run = BEFORE, AFTER, RUN
wrk.method = "POST"
wrk.headers["Authorization"] = "Bearer KEY"
wrk.headers["Content-Type"] = "application/json"
"""
_ONE = """
function request()
  counter = counter + 1
  return wrk.format(nil, PATH, nil, before .. run .. "-" .. counter .. after)
end
"""
_MANY = """
function request()
  local parts = {}
  for at = 1, COUNT do
    counter = counter + 1
    parts[at] = before .. run .. "-" .. counter .. after
  end
  return wrk.format(nil, PATH, nil, "[" .. table.concat(parts, ",") .. "]")
end
"""
_BINARY = """
wrk.method = "POST"
HEADERS
local file = assert(io.open(FILE, "rb"))
local rest, pieces, widths = file:read("*a"), {}, {}
local places = {PLACES}
while true do
  local first, last, width
  for _, place in ipairs(places) do
    local from, to = string.find(rest, place[1], 1, true)
    if from and (not first or from < first) then first, last, width = from, to, place[2] end
  end
  if not first then break end
  pieces[#pieces + 1], widths[#widths + 1] = string.sub(rest, 1, first - 1), width
  rest = string.sub(rest, last + 1)
end
local counter = RUN * 10000000
function request()
  local parts = {}
  for at = 1, #pieces do
    counter = counter + 1
    parts[2 * at - 1] = pieces[at]
    parts[2 * at] = string.format("%0" .. widths[at] .. "d", counter)
  end
  parts[#parts + 1] = rest
  return wrk.format(nil, PATH, nil, table.concat(parts))
end
"""
PLACE = "TRACE-ID"
"""What stands for the id in the document that is sent."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of wrk saw; times in milliseconds."""

    rate: float
    p50: float
    p99: float
    requests: int
    refused: int
    broken: int


def load(url: str, path: str, key: str, body: bytes, *, connections: int, seconds: float, run: str) -> Load:
    """Send the body, each time under a new id, for a while."""
    script = _script(_ONE, body, key, run).replace("PATH", _quoted(path))
    return _run(url, script, connections, seconds)


def load_batches(
    url: str,
    key: str,
    document: Callable[[str], dict[str, Any]],
    count: int,
    *,
    connections: int,
    seconds: float,
    run: str,
) -> Load:
    """Send arrays of `count` documents, each under a new id, for a while."""
    script = _script(_MANY, encoded(document(PLACE)), key, run)
    script = script.replace("PATH", _quoted("/v1/traces/batch")).replace("COUNT", str(count))
    return _run(url, script, connections, seconds)


def load_binary(
    url: str,
    path: str,
    headers: Mapping[str, str],
    body: Path,
    places: Mapping[bytes, int],
    *,
    connections: int,
    seconds: float,
    run: int,
) -> Load:
    """Send the file's bytes for a while, each placeholder replaced by a new number of its own width."""
    named = "\n".join(f"wrk.headers[ {_quoted(name)} ] = {_quoted(value)}" for name, value in headers.items())
    found = ", ".join(f"{{{_quoted(place.decode())}, {width}}}" for place, width in places.items())
    script = (_BINARY + _DONE).replace("HEADERS", named).replace("FILE", _quoted(str(body)))
    script = script.replace("PLACES", found).replace("RUN", str(run)).replace("PATH", _quoted(path))
    return _run(url, script, connections, seconds)


def _script(request: str, body: bytes, key: str, run: str) -> str:
    before, _, after = body.decode().partition(PLACE)
    # The document last: nothing in it is a placeholder then.
    script = (_HEADERS + request + _DONE).replace("KEY", key).replace("RUN", _quoted(run))
    return script.replace("BEFORE", _quoted(before)).replace("AFTER", _quoted(after))


def _run(url: str, script: str, connections: int, seconds: float) -> Load:
    wrk = shutil.which("wrk")
    if wrk is None:
        raise RuntimeError("wrk is missing: apt-get install wrk")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "load.lua"
        file.write_text(script)
        options = ["-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"]
        done = subprocess.run(
            [wrk, *options, "-s", file, url],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = json.loads(done.stdout.partition("RESULT ")[2])
    return Load(
        found["requests"] / found["seconds"], found["p50"], found["p99"],
        found["requests"], found["refused"], found["broken"],
    )  # fmt: skip


def _quoted(text: str) -> str:
    level = "=" * 8
    return f"[{level}[{text}]{level}]"
