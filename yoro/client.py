"""The public client: posts traces and grades, reads status and adapters; retries what is safe.

Every call may be repeated: the service recognises a duplicate, so an answer lost on the way is simply
asked for again. Knows nothing of the service's code.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

RETRIED_STATUSES = (429, 502, 503, 504)


class ApiError(Exception):
    """The service refused: `status`, its `code`, and the whole problem document."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        """Take the problem document as it came."""
        super().__init__(f"{status} {problem.get('code', '')}: {problem.get('detail', '')}")
        self.status = status
        self.code = str(problem.get("code", ""))
        self.problem = dict(problem)


class Client:
    """A connection to one yoro service. Example: `Client("http://127.0.0.1:8080", "yoro_…")`."""

    def __init__(self, url: str, key: str = "", *, timeout: float = 30.0, retries: int = 8) -> None:
        """Open no connection yet; `retries` are those after the first try."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        self._retries = retries

    def __enter__(self) -> Self:
        """Use as a context manager to close connections."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close connections."""
        self.close()

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    def post_trace(self, trace: Mapping[str, Any]) -> dict[str, Any]:
        """Post one trace; returns once it is durable. Raises ApiError (409: the id has other content)."""
        return self._json("POST", "/v1/traces", json=dict(trace))

    def post_reward(self, grade: Mapping[str, Any]) -> dict[str, Any]:
        """Post one grade; its trace may come later. Returns once it is durable."""
        return self._json("POST", "/v1/rewards", json=dict(grade))

    def create_policy(self, name: str, **settings: Any) -> dict[str, Any]:
        """Create a policy; `base_model` is needed."""
        return self._json("POST", "/v1/policies", json={"name": name, **settings})

    def policies(self) -> list[dict[str, Any]]:
        """List the policies that the key may touch."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/policies")["policies"]
        return found

    def policy(self, name: str) -> dict[str, Any]:
        """Show one policy with its settings."""
        return self._json("GET", f"/v1/policies/{name}")

    def revise_policy(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a partial document into the settings, as a new revision."""
        return self._json("PATCH", f"/v1/policies/{name}", json=dict(changes))

    def pause_policy(self, name: str) -> dict[str, Any]:
        """Stop forming and training batches; intake goes on."""
        return self._json("POST", f"/v1/policies/{name}/pause")

    def resume_policy(self, name: str) -> dict[str, Any]:
        """Go on after a pause."""
        return self._json("POST", f"/v1/policies/{name}/resume")

    def create_key(
        self, name: str, roles: Sequence[str], policies: Sequence[str] | None, expires_in_days: float | None
    ) -> dict[str, Any]:
        """Create an API key; the answer is the only place where it stands."""
        document = {
            "name": name, "roles": list(roles), "policies": None if policies is None else list(policies),
            "expires_in_days": expires_in_days,
        }  # fmt: skip
        return self._json("POST", "/v1/keys", json=document)

    def keys(self) -> list[dict[str, Any]]:
        """List keys by what is stored of them."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/keys")["keys"]
        return found

    def revoke_key(self, prefix: str) -> dict[str, Any]:
        """Revoke a key for good."""
        return self._json("DELETE", f"/v1/keys/{prefix}")

    def status(self, policy: str) -> dict[str, Any]:
        """Say what the policy waits for."""
        return self._json("GET", f"/v1/policies/{policy}/status")

    def adapter(self, policy: str, which: str = "latest") -> dict[str, Any]:
        """Show the manifest of `latest`, `promoted` or a number."""
        return self._json("GET", f"/v1/policies/{policy}/adapters/{which}")

    @contextmanager
    def adapter_file(self, policy: str, version: int, name: str) -> Iterator[Iterator[bytes]]:
        """Stream one file of a version."""
        path = f"/v1/policies/{policy}/adapters/{version}/files/{name}"
        with self._http.stream("GET", path) as answer:
            if answer.is_error:
                answer.read()
            _check(answer)
            yield answer.iter_bytes(1 << 20)

    def _json(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        document: dict[str, Any] = self._send(method, path, **request).json()
        return document

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                answer = self._http.request(method, path, **request)
            except httpx.TransportError:
                if last:
                    raise
                _wait(attempt, None)
                continue
            if answer.status_code not in RETRIED_STATUSES or last:
                return _check(answer)
            _wait(attempt, answer.headers.get("retry-after"))
        raise AssertionError("unreachable")


def _check(answer: httpx.Response) -> httpx.Response:
    if answer.is_error:
        try:
            problem = answer.json()
        except ValueError:
            problem = {"detail": answer.text[:500]}
        raise ApiError(answer.status_code, problem if isinstance(problem, dict) else {"detail": problem})
    return answer


def _wait(attempt: int, retry_after: str | None) -> None:
    """Wait as long as the service asks, else exponentially with jitter, at most 10 s."""
    asked = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
    jittered = random.uniform(0.5, 1.0) * min(10.0, 0.1 * 2**attempt)  # noqa: S311
    time.sleep(min(10.0, max(asked, jittered)))
