"""The public client for asyncio: for agents, graders and whoever serves versions; retries as `Client` does.

Every call may be repeated: the service recognises a duplicate. Knows nothing of the service's code.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from yoro import retries
from yoro.retries import ApiError, bearer


class AsyncClient:
    """A connection to one yoro service. Example: `AsyncClient("http://127.0.0.1:8080", "yoro_…")`."""

    def __init__(self, url: str, key: str = "", *, timeout: float = 30.0, retries: int = 8) -> None:
        """Open no connection yet; `retries` are those after the first try."""
        self._http = httpx.AsyncClient(base_url=url, headers=bearer(key), timeout=timeout)
        self._retries = retries

    async def __aenter__(self) -> Self:
        """Use as a context manager to close connections."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close connections."""
        await self.close()

    async def close(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def post_trace(self, trace: Mapping[str, Any]) -> dict[str, Any]:
        """Post one trace; returns once it is durable. Raises ApiError (409: the id has other content)."""
        return await self._json("POST", "/v1/traces", json=dict(trace))

    async def post_reward(self, grade: Mapping[str, Any]) -> dict[str, Any]:
        """Post one grade; its trace may come later. Returns once it is durable."""
        return await self._json("POST", "/v1/rewards", json=dict(grade))

    async def post_traces(self, traces: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Post many traces in batches; one result each, in order, with `problem` where one was refused."""
        return await self._post_many("/v1/traces/batch", traces)

    async def post_rewards(self, grades: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Post many grades in batches; one result each, in order, with `problem` where one was refused."""
        return await self._post_many("/v1/rewards/batch", grades)

    async def status(self, policy: str) -> dict[str, Any]:
        """Say what the policy waits for."""
        return await self._json("GET", f"/v1/policies/{policy}/status")

    async def adapter(self, policy: str, which: str = "latest") -> dict[str, Any]:
        """Show the manifest of `latest`, `promoted` or a number."""
        return await self._json("GET", f"/v1/policies/{policy}/adapters/{which}")

    async def await_adapter(
        self, policy: str, which: str, *, unless: int | None, seconds: float
    ) -> dict[str, Any] | None:
        """Show what a pointer comes to as soon as that is not `unless`; None: it has stayed there."""
        path, query = f"/v1/policies/{policy}/adapters/{which}", retries.given(wait=seconds, unless=unless)
        answer = await self._send("GET", path, params=query, timeout=seconds + 30.0)
        return None if answer.status_code == 304 else dict(answer.json())

    async def promote(
        self, policy: str, version: int, *, force: bool = False, note: str = ""
    ) -> dict[str, Any]:
        """Point `promoted` at a version."""
        path = f"/v1/policies/{policy}/adapters/{version}/promote"
        return await self._json("POST", path, json={"force": force, "note": note})

    async def roll_back(
        self, policy: str, to: int, *, rewind_trainer: bool = False, force: bool = False, note: str = ""
    ) -> dict[str, Any]:
        """Go back to an older version: what serves alone, or the trainer too."""
        wish = {"to": to, "rewind_trainer": rewind_trainer, "force": force, "note": note}
        return await self._json("POST", f"/v1/policies/{policy}/rollback", json=wish)

    async def trace(self, trace_id: str, policy: str | None = None) -> dict[str, Any]:
        """Tell one trace's whole story: its grades, where it stands and why. Needs the role `reader`."""
        return await self._json("GET", f"/v1/traces/{trace_id}", params=retries.given(policy=policy))

    async def _post_many(self, path: str, documents: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        for lines in retries.batches(documents):
            results += retries.numbered(await self._post_lines(path, lines), len(results))
        return results

    async def _post_lines(self, path: str, lines: Sequence[bytes]) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = (await self._json("POST", path, **retries.ndjson(lines)))["results"]
        except ApiError as error:
            if not retries.must_split(error, lines):
                raise
            middle = len(lines) // 2
            return await self._post_lines(path, lines[:middle]) + await self._post_lines(path, lines[middle:])
        return found

    async def _json(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        document: dict[str, Any] = (await self._send(method, path, **request)).json()
        return document

    async def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        for attempt in range(self._retries):
            try:
                answer = await self._http.request(method, path, **request)
            except httpx.TransportError:
                await asyncio.sleep(retries.backoff(attempt))
                continue
            wait = retries.wait_before_retry(answer, attempt)
            if wait is None:
                return retries.checked(answer)
            await asyncio.sleep(wait)
        return retries.checked(await self._http.request(method, path, **request))
