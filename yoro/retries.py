"""What the clients of either kind share: errors, when to try again, and how to split many documents.

Sans I/O: knows neither httpx's sync nor its async side, and nothing of the service's code.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx

RETRIED_STATUSES = (429, 502, 503, 504)
LONGEST_WAIT = 10.0
LONGEST_ASKED = 60.0
"""A service that asks to wait longer (a day's quota) will not be asked again: the caller decides."""
BATCH_ITEMS = 100
BATCH_BYTES = 4 << 20


class ApiError(Exception):
    """The service refused: `status`, its `code`, and the whole problem document."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        """Take the problem document as it came."""
        super().__init__(f"{status} {problem.get('code', '')}: {problem.get('detail', '')}")
        self.status = status
        self.code = str(problem.get("code", ""))
        self.problem = dict(problem)


def bearer(key: str) -> dict[str, str]:
    """Return the headers that carry a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def given(**query: Any) -> dict[str, Any]:
    """Return the parameters of a query, or fields of a document, that have a value."""
    return {name: value for name, value in query.items() if value is not None}


def wait_before_retry(answer: httpx.Response, attempt: int) -> float | None:
    """Return the seconds to wait before the request is sent again; None: it must not be."""
    if answer.status_code not in RETRIED_STATUSES:
        return None
    asked = answer.headers.get("retry-after", "")
    seconds = float(asked) if asked.isdecimal() else 0.0
    return None if seconds > LONGEST_ASKED else max(seconds, backoff(attempt))


def backoff(attempt: int) -> float:
    """Return an exponential wait with jitter, so that clients which met do not meet again."""
    longest: float = min(LONGEST_WAIT, 0.1 * 2.0**attempt)
    return random.uniform(0.5, 1.0) * longest  # noqa: S311


def checked(answer: httpx.Response) -> httpx.Response:
    """Return the answer. Raises ApiError where it is an error; its body must have been read."""
    if answer.is_error:
        try:
            problem = answer.json()
        except ValueError:  # a proxy's page
            problem = {"detail": answer.text[:500]}
        raise ApiError(answer.status_code, problem if isinstance(problem, dict) else {"detail": problem})
    return answer


def batches(documents: Iterable[Mapping[str, Any]]) -> Iterator[list[bytes]]:
    """Encode documents and group them into requests of bounded count and size."""
    group: list[bytes] = []
    size = 0
    for document in documents:
        line = encoded(document)
        if group and (len(group) == BATCH_ITEMS or size + len(line) > BATCH_BYTES):
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line)
    if group:
        yield group


def encoded(document: Mapping[str, Any]) -> bytes:
    """Return a document as one line of JSON. Raises ValueError for NaN, which JSON cannot say."""
    return json.dumps(dict(document), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def ndjson(lines: Sequence[bytes]) -> dict[str, Any]:
    """Return httpx's arguments of a batch request."""
    return {"content": b"\n".join(lines), "headers": {"Content-Type": "application/x-ndjson"}}


def must_split(error: ApiError, lines: Sequence[bytes]) -> bool:
    """Tell whether a batch was refused for its size and can be sent in two halves."""
    return error.status == 413 and len(lines) > 1


def from_byte(start: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield chunks without their first `start` bytes: some proxies answer a Range with the whole."""
    for chunk in chunks:
        if len(chunk) > start:
            yield chunk[start:]
        start = max(0, start - len(chunk))


def numbered(results: Sequence[Mapping[str, Any]], start: int) -> list[dict[str, Any]]:
    """Return the results of one request with their indexes among all documents."""
    return [{**result, "index": start + at} for at, result in enumerate(results)]
