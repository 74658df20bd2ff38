"""Disk full, slow statements, a database that is gone, overload: 503 with Retry-After, and no loss."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import Request, Response
from sqlalchemy import Engine, text

from service.api.direct import DirectApp
from service.database.engine import transaction
from service.errors import Unavailable
from tests.conftest import Api, MakePolicy
from tests.databases import unreachable
from tests.documents import grade, trace

BREAK = """
CREATE FUNCTION break_it() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'broken' USING ERRCODE = '{state}'; END $$;
CREATE TRIGGER broken BEFORE INSERT ON {table} FOR EACH STATEMENT EXECUTE FUNCTION break_it();
"""


def execute(engine: Engine, statement: str) -> None:
    with transaction(engine) as connection:
        connection.execute(text(statement))


def count(engine: Engine, table: str) -> int:
    with transaction(engine) as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())  # noqa: S608


def refused(answer: Any) -> bool:
    return bool(answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1)


@pytest.mark.parametrize(
    ("state", "table"),
    [
        ("53100", "rollout_documents"),  # disk_full
        ("53200", "rollout_features"),  # out_of_memory
        ("57014", "rollout_documents"),  # query_canceled, as by statement_timeout
        ("58030", "rollouts"),  # io_error
        ("XX000", "rollouts"),  # internal_error
        ("40P01", "rollouts"),  # deadlock_detected, again and again
    ],
)
def test_a_failing_database_stores_nothing_of_a_batch_and_takes_it_later(
    state: str, table: str, api: Api, engine: Engine, make_policy: MakePolicy
) -> None:
    make_policy()
    sent = [trace() for _ in range(5)]
    execute(engine, BREAK.format(state=state, table=table))
    assert refused(api.call("agent", "POST", "/v1/traces/batch", json=sent))
    assert refused(api.post_trace(sent[0]))
    assert count(engine, "rollouts") == 0
    execute(engine, f"DROP TRIGGER broken ON {table}")
    results = api.call("agent", "POST", "/v1/traces/batch", json=sent).json()["results"]
    assert [result["status"] for result in results] == ["accepted"] * 5
    assert count(engine, "rollout_documents") == 5


def test_a_database_that_is_gone_and_comes_back(api: Api, database_url: str, make_policy: MakePolicy) -> None:
    make_policy()
    document = trace()
    with unreachable(database_url):
        assert refused(api.post_trace(document))
        assert refused(api.post_reward(grade("x")))
    assert api.post_trace(document).status_code == 201


def test_a_statement_that_takes_too_long_is_ended(api: Api, engine: Engine, make_policy: MakePolicy) -> None:
    make_policy()
    with transaction(engine) as connection:  # for the connections that the api opens from here on
        connection.execute(text(f"ALTER DATABASE {engine.url.database} SET statement_timeout = '100ms'"))
    with engine.connect() as holder:
        holder.execute(text("LOCK TABLE rollout_documents IN ACCESS EXCLUSIVE MODE"))
        writing = api.client.app.state.context.writes._writer.engine  # type: ignore[attr-defined]
        writing.dispose()
        with writing.connect() as bounded:
            assert bounded.execute(text("SHOW statement_timeout")).scalar_one() == "30s"
            bounded.execute(text("SET statement_timeout = '100ms'"))
            bounded.commit()
        assert refused(api.post_trace(trace()))
    assert api.post_trace(trace()).status_code == 201


def test_overload_is_answered_503_and_what_was_taken_is_stored(
    api: Api, engine: Engine, make_policy: MakePolicy
) -> None:
    """The writer is held by a lock while more comes than its queue may hold."""
    make_policy()
    writes = api.client.app.state.context.writes  # type: ignore[attr-defined]
    writes._max_items = 4
    sent = [trace() for _ in range(20)]
    with ThreadPoolExecutor(20) as pool, engine.connect() as holder:
        holder.execute(text("LOCK TABLE rollouts IN ACCESS EXCLUSIVE MODE"))
        answers = list(map(pool.submit, [api.post_trace] * 20, sent))
        # Two writers hold four at most each, four are queued, the rest is refused.
        while sum(answer.done() for answer in answers) < 8:
            threading.Event().wait(0.01)
        holder.rollback()
        statuses = [answer.result().status_code for answer in answers]
    assert set(statuses) == {201, 503}
    assert count(engine, "rollouts") == statuses.count(201)


def test_intake_is_refused_while_it_closes(api: Api, make_policy: MakePolicy) -> None:
    make_policy()
    writes = api.client.app.state.context.writes  # type: ignore[attr-defined]
    writes.close()
    assert refused(api.post_trace(trace()))
    with pytest.raises(Unavailable):
        writes.submit([], 0)


def test_a_request_that_a_stopping_server_gives_up_on_is_answered_503() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def stop_while_it_waits() -> None:
        waits = asyncio.Event()

        async def handler(request: Request) -> Response:
            waits.set()
            await asyncio.Event().wait()
            raise AssertionError

        app = DirectApp()
        app.direct = {"/v1/traces": handler}
        scope = {"type": "http", "method": "POST", "path": "/v1/traces", "headers": []}
        serving = asyncio.create_task(app(scope, None, send))  # type: ignore[arg-type]
        await waits.wait()
        serving.cancel()
        await serving

    asyncio.run(stop_while_it_waits())
    assert sent[0]["status"] == 503
    assert (b"content-type", b"application/problem+json") in sent[0]["headers"]
