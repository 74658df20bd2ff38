"""The public client: posts traces and grades, reads status and adapters; retries what is safe.

Every call may be repeated: the service recognises a duplicate, so an answer lost on the way is simply
asked for again. Knows nothing of the service's code.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from yoro import retries
from yoro.retries import ApiError, bearer

__all__ = ["ApiError", "Client"]


class Client:
    """A connection to one yoro service. Example: `Client("http://127.0.0.1:8080", "yoro_…")`."""

    def __init__(self, url: str, key: str = "", *, timeout: float = 30.0, retries: int = 8) -> None:
        """Open no connection yet; `retries` are those after the first try."""
        self._http = httpx.Client(base_url=url, headers=bearer(key), timeout=timeout)
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

    def post_traces(self, traces: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Post many traces in batches; one result each, in order, with `problem` where one was refused."""
        return self._post_many("/v1/traces/batch", traces)

    def post_rewards(self, grades: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Post many grades in batches; one result each, in order, with `problem` where one was refused."""
        return self._post_many("/v1/rewards/batch", grades)

    def trace(self, trace_id: str, policy: str | None = None) -> dict[str, Any]:
        """Tell one trace's whole story: its grades, where it stands and why. Needs the role `reader`."""
        return self._json("GET", f"/v1/traces/{trace_id}", params=retries.given(policy=policy))

    def traces(
        self, policy: str | None = None, *, state: str | None = None, reason: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """List traces, newest first, of a state and a reason in it. Needs the role `reader`."""
        query = retries.given(policy=policy, state=state, reason=reason)
        return self._pages("/v1/traces", "traces", query)

    def erase_trace(self, trace_id: str, policy: str | None = None) -> dict[str, Any]:
        """Erase a trace for good; versions trained on it are marked tainted."""
        return self._json("DELETE", f"/v1/traces/{trace_id}", params=retries.given(policy=policy))

    def limits(self) -> dict[str, Any]:
        """Return what the service takes: sizes, counts, depth."""
        return self._json("GET", "/v1/limits")

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
        self,
        name: str,
        roles: Sequence[str],
        policies: Sequence[str] | None = None,
        expires_in_days: float | None = None,
        rate_per_second: float | None = None,
    ) -> dict[str, Any]:
        """Create an API key; the answer is the only place where it stands."""
        document = {
            "name": name, "roles": list(roles), "policies": None if policies is None else list(policies),
            "expires_in_days": expires_in_days, "rate_per_second": rate_per_second,
        }  # fmt: skip
        return self._json("POST", "/v1/keys", json=document)

    def keys(self) -> list[dict[str, Any]]:
        """List keys by what is stored of them."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/keys")["keys"]
        return found

    def revoke_key(self, prefix: str) -> dict[str, Any]:
        """Revoke a key for good."""
        return self._json("DELETE", f"/v1/keys/{prefix}")

    def dead_letters(self, *, code: str | None = None, everything: bool = False) -> Iterator[dict[str, Any]]:
        """List Kafka messages that could not be taken, newest first; without `everything` the open ones."""
        query: dict[str, Any] = {"open": not everything} | ({} if code is None else {"code": code})
        while True:
            page = self._json("GET", "/v1/dead-letters", params=query)
            yield from page["dead_letters"]
            if page["next_cursor"] is None:
                return
            query["cursor"] = page["next_cursor"]

    def dead_letter(self, letter: int) -> dict[str, Any]:
        """Show one dead letter with what is kept of it."""
        return self._json("GET", f"/v1/dead-letters/{letter}")

    def replay_dead_letters(
        self, letters: Sequence[int] | None = None, *, code: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Take dead letters in again: these, or all open ones of a code; say what became of each."""
        wish: dict[str, Any] = {"ids": None if letters is None else list(letters), "code": code, "after": 0}
        while wish["after"] is not None:
            page = self._json("POST", "/v1/dead-letters/replay", json=wish)
            yield from page["results"]
            wish["after"] = page["next_after"]

    def status(self, policy: str) -> dict[str, Any]:
        """Say what the policy waits for."""
        return self._json("GET", f"/v1/policies/{policy}/status")

    def baselines(self, policy: str, batches: int = 200) -> dict[str, Any]:
        """Compare every estimator on the policy's own last batches."""
        return self._json("GET", f"/v1/policies/{policy}/baselines?batches={batches}")

    def adapter(self, policy: str, which: str = "latest") -> dict[str, Any]:
        """Show the manifest of `latest`, `promoted` or a number."""
        return self._json("GET", f"/v1/policies/{policy}/adapters/{which}")

    def await_adapter(
        self, policy: str, which: str, *, unless: int | None, seconds: float
    ) -> dict[str, Any] | None:
        """Show what a pointer comes to as soon as that is not `unless`; None: it has stayed there."""
        query = {"wait": seconds} | ({} if unless is None else {"unless": unless})
        answer = self._send(
            "GET", f"/v1/policies/{policy}/adapters/{which}", params=query, timeout=seconds + 30.0
        )
        return None if answer.status_code == 304 else dict(answer.json())

    def adapters(self, policy: str) -> Iterator[dict[str, Any]]:
        """List the versions of a policy, newest first."""
        return self._pages(f"/v1/policies/{policy}/adapters", "adapters", {})

    def pointer_moves(self, policy: str) -> Iterator[dict[str, Any]]:
        """List where `latest` and `promoted` pointed, when and why, newest first."""
        return self._pages(f"/v1/policies/{policy}/pointer-moves", "moves", {})

    def promotion_checks(self, policy: str) -> list[dict[str, Any]]:
        """List what gates and hook said of the newest versions of a gated policy."""
        found: list[dict[str, Any]] = self._json("GET", f"/v1/policies/{policy}/promotion-checks")["checks"]
        return found

    def steps(self, policy: str) -> Iterator[dict[str, Any]]:
        """List ended batches, newest first, with their metrics."""
        return self._pages(f"/v1/policies/{policy}/steps", "steps", {})

    def promote(self, policy: str, version: int, *, force: bool = False, note: str = "") -> dict[str, Any]:
        """Point `promoted` at a version."""
        path = f"/v1/policies/{policy}/adapters/{version}/promote"
        return self._json("POST", path, json={"force": force, "note": note})

    def roll_back(
        self, policy: str, to: int, *, rewind_trainer: bool = False, force: bool = False, note: str = ""
    ) -> dict[str, Any]:
        """Go back to an older version: what serves alone, or the trainer too."""
        wish = {"to": to, "rewind_trainer": rewind_trainer, "force": force, "note": note}
        return self._json("POST", f"/v1/policies/{policy}/rollback", json=wish)

    def pin(self, policy: str, version: int, *, pinned: bool = True) -> dict[str, Any]:
        """Keep a version's files for good, or leave them to retention again."""
        return self._json("POST" if pinned else "DELETE", f"/v1/policies/{policy}/adapters/{version}/pin")

    @contextmanager
    def adapter_file(self, policy: str, version: int, name: str, start: int = 0) -> Iterator[Iterator[bytes]]:
        """Stream one file of a version from byte `start` on."""
        path = f"/v1/policies/{policy}/adapters/{version}/files/{name}"
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with self._http.stream("GET", path, headers=headers) as answer:
            if answer.is_error:
                answer.read()
            retries.checked(answer)
            yield retries.from_byte(start if answer.status_code == 200 else 0, answer.iter_raw())

    def _json(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        document: dict[str, Any] = self._send(method, path, **request).json()
        return document

    def _pages(self, path: str, name: str, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what a list holds, page after page."""
        cursor: dict[str, Any] = {}
        while True:
            page = self._json("GET", path, params={**query, **cursor})
            yield from page[name]
            if page["next_cursor"] is None:
                return
            cursor = {"cursor": page["next_cursor"]}

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        for attempt in range(self._retries):
            try:
                answer = self._http.request(method, path, **request)
            except httpx.TransportError:
                time.sleep(retries.backoff(attempt))
                continue
            wait = retries.wait_before_retry(answer, attempt)
            if wait is None:
                return retries.checked(answer)
            time.sleep(wait)
        return retries.checked(self._http.request(method, path, **request))

    def _post_many(self, path: str, documents: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        for lines in retries.batches(documents):
            results += retries.numbered(self._post_lines(path, lines), len(results))
        return results

    def _post_lines(self, path: str, lines: Sequence[bytes]) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self._json("POST", path, **retries.ndjson(lines))["results"]
        except ApiError as error:
            if not retries.must_split(error, lines):
                raise
            middle = len(lines) // 2
            return self._post_lines(path, lines[:middle]) + self._post_lines(path, lines[middle:])
        return found
