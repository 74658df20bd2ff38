"""The public clients against the real API over TCP: batches, retries, what is retried and what is not."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from service.database.engine import transaction
from tests.documents import grade, trace
from yoro import ApiError, AsyncClient, Client


def count(rows: Engine, prefix: str) -> int:
    with transaction(rows) as connection:
        found = connection.execute(
            text("SELECT count(*) FROM rollouts WHERE starts_with(trace_id, :prefix)"), {"prefix": prefix}
        )
        return int(found.scalar_one())


def test_a_first_call_of_each_kind(url: str, key: str) -> None:
    with Client(url, key) as client:
        document = trace()
        assert client.post_trace(document)["status"] == "accepted"
        assert client.post_trace(document)["status"] == "duplicate"
        assert client.post_reward(grade(document["trace_id"], 0.5))["effect"] == "counts"
        assert client.limits()["batch_items"] == 1000
        with pytest.raises(ApiError) as raised:
            client.post_trace({**document, "metadata": {"x": 1}})
    assert (raised.value.status, raised.value.code) == (409, "trace_conflict")


def test_many_documents_go_in_batches_and_come_back_in_order(url: str, key: str, rows: Engine) -> None:
    sent = [trace(trace_id=f"many-{n}") for n in range(250)]
    sent[120]["messages"] = []
    with Client(url, key) as client:
        results = client.post_traces(iter(sent))
        graded = client.post_rewards(grade(f"many-{n}", 1.0) for n in range(250))
    assert [result["index"] for result in results] == list(range(250))
    assert [n for n, result in enumerate(results) if "problem" in result] == [120]
    assert results[120]["problem"]["status"] == 422
    assert [r["effect"] for r in graded].count("counts") == 249
    assert count(rows, "many-") == 250, "249 traces and one grade that waits for its own"


def test_the_async_client_does_the_same(url: str, key: str, rows: Engine) -> None:
    async def run() -> list[Any]:
        async with AsyncClient(url, key) as client:
            posted = await asyncio.gather(*(client.post_trace(trace(trace_id=f"aio-{n}")) for n in range(50)))
            results = await client.post_traces([trace(trace_id=f"aio-b{n}") for n in range(120)])
            graded = await client.post_rewards([grade("aio-1", 1.0)])
            state = await client.status("support")
            return [*posted, *results, *graded, state]

    found = asyncio.run(run())
    assert all(result["status"] == "accepted" for result in found[:-1])
    assert count(rows, "aio-") == 170


def test_what_ops_and_readers_ask_for(url: str, key: str) -> None:
    async def through_asyncio() -> Any:
        async with AsyncClient(url, key) as client:
            assert (await client.promote("support", 0))["promoted_version"] == 0
            assert (await client.roll_back("support", 0))["promoted_version"] == 0
            assert await client.await_adapter("support", "promoted", unless=0, seconds=0.1) is None
            assert (await client.await_adapter("support", "latest", unless=9, seconds=0.1) or {})[
                "version"
            ] == 0
            return await client.trace("told-1", "support")

    with Client(url, key) as client:
        for number in range(60):  # more than a page
            client.post_trace(trace(trace_id=f"told-{number}"))
        story = client.trace("told-1", policy="support")
        told = [each["trace_id"] for each in client.traces("support", state="waiting_reward")]
        assert [each for each in told if each.startswith("told-")] == [f"told-{n}" for n in range(59, -1, -1)]
        assert (story["trace_id"], story["state"]) == ("told-1", "waiting_reward")
        assert asyncio.run(through_asyncio()) == story
        assert client.erase_trace("told-1", "support")["status"] == "erased"
        with pytest.raises(ApiError) as raised:
            client.trace("told-1", "support")
        assert raised.value.status == 410
        assert client.promote("support", 0)["promoted_version"] == 0
        assert client.roll_back("support", 0, rewind_trainer=True)["head"] == 0
        assert list(client.adapters("support")) == list(client.steps("support")) == []
        assert list(client.pointer_moves("support")) == client.promotion_checks("support") == []
        with pytest.raises(ApiError) as raised:
            client.promote("support", 9)
        assert raised.value.code == "version_not_found"


def test_1200_grades_of_fifty_threads_that_end_at_once_are_all_there(
    url: str, key: str, rows: Engine
) -> None:
    def work(worker: int) -> None:
        with Client(url, key) as client:
            for number in range(24):
                assert client.post_reward(grade(f"burst-{worker}-{number}", 1.0))["status"] == "accepted"

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert count(rows, "burst-") == 1200


class Scripted(BaseHTTPRequestHandler):
    """A service that answers as told: a status, a header, or a cut connection."""

    answers: list[tuple[int, dict[str, str], bytes]]
    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        status, headers, body = self.answers.pop(0)
        if not status:  # the answer is lost on the way
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def scripted() -> Iterator[tuple[str, type[Scripted]]]:
    """A scripted service and where it listens."""
    handler = type("Handler", (Scripted,), {"answers": [], "bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()


OK = (201, {}, b'{"status": "accepted"}')
BUSY = (503, {"Retry-After": "0"}, b"{}")


def post(url: str, kind: str) -> Any:
    if kind == "sync":
        with Client(url, retries=3) as client:
            return client.post_trace(trace())

    async def run() -> Any:
        async with AsyncClient(url, retries=3) as client:
            return await client.post_trace(trace())

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    "first", [BUSY, (502, {}, b"<html>"), (429, {"Retry-After": "0"}, b"{}"), (0, {}, b"")]
)
def test_what_may_pass_is_sent_again_unchanged(
    kind: str, first: Any, scripted: tuple[str, type[Scripted]]
) -> None:
    url, handler = scripted
    handler.answers += [first, first, OK]
    assert post(url, kind) == {"status": "accepted"}
    assert len(handler.bodies) == 3
    assert len(set(handler.bodies)) == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    "answer",
    [(422, {}, b'{"code": "invalid"}'), (409, {}, b"{}"), (413, {}, b"<html>too large</html>"),
     (500, {}, b"{}"), (429, {"Retry-After": "3600"}, b'{"code": "policy_quota"}')],
)  # fmt: skip
def test_what_will_not_pass_is_raised_at_once(
    kind: str, answer: Any, scripted: tuple[str, type[Scripted]]
) -> None:
    url, handler = scripted
    handler.answers += [answer]
    with pytest.raises(ApiError) as raised:
        post(url, kind)
    assert raised.value.status == answer[0]
    assert len(handler.bodies) == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_retries_end(kind: str, scripted: tuple[str, type[Scripted]]) -> None:
    url, handler = scripted
    handler.answers += [BUSY] * 4
    with pytest.raises(ApiError):
        post(url, kind)
    assert len(handler.bodies) == 4


def test_a_batch_that_is_too_large_for_the_service_is_split(scripted: tuple[str, type[Scripted]]) -> None:
    url, handler = scripted
    half = (207, {}, b'{"results": [{"index": 0}, {"index": 1}]}')
    handler.answers += [(413, {}, b"<html>"), half, half]
    with Client(url) as client:
        results = client.post_traces(trace() for _ in range(4))
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert handler.bodies[0] == handler.bodies[1] + b"\n" + handler.bodies[2]


def test_nan_never_leaves_the_client() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(ValueError, match="JSON"):
        client.post_traces([trace(metadata={"x": float("nan")})])
    with Client("http://127.0.0.1:9") as client, pytest.raises((ValueError, httpx.TransportError)):
        client.post_trace(trace(metadata={"x": float("nan")}))
