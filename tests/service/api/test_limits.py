"""Every limit has a code of its own, stands at /v1/limits, and can be configured."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine

from service import keys
from service.api.app import create_app
from service.database.engine import transaction
from service.settings import Settings
from tests.conftest import Api
from tests.documents import grade, trace
from tests.service.api.conftest import make_policy, send

NARROW = {
    "BODY_BYTES": 40_000, "INFLATED_BYTES": 60_000, "TRACE_BYTES": 20_000, "GRADE_BYTES": 2_000,
    "BATCH_ITEMS": 3,
    "MESSAGES": 4, "TOKENS": 10, "JSON_DEPTH": 10, "ID_CHARACTERS": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def narrow(rows: Engine, module_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API whose limits are small, set as an operator sets them."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in NARROW.items():
            environment.setenv(f"YORO_LIMIT_{name}", str(value))
        app = create_app(Settings(database_url=module_database, data=tmp_path_factory.mktemp("narrow")))
        app.state.settings.limits  # noqa: B018 - read while the environment says so
    with transaction(rows) as connection:
        minted = {role: keys.mint(connection, role, [role]) for role in keys.ROLES}
    make_policy(rows, "support")
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Api(client, minted)


def test_every_limit_is_readable(narrow: Api) -> None:
    shown = narrow.client.get("/v1/limits").json()
    assert {name.lower(): value for name, value in NARROW.items()}.items() <= shown.items()
    assert {"queue_items", "queue_bytes", "in_flight_bytes"} <= set(shown)


def call(tokens: int) -> dict[str, Any]:
    return {"message_index": 1, "prompt_token_ids": [1] * (tokens - 1), "completion_token_ids": [1]}


@pytest.mark.parametrize(
    ("document", "status", "code"),
    [
        (trace(metadata={"x": "y" * 50_000}), 413, "body_bytes"),
        (trace(metadata={"x": "y" * 25_000}), 413, "trace_bytes"),
        (trace(messages=[{"role": "user", "content": "x"}] * 5), 413, "messages"),
        (trace(calls=[call(11)]), 413, "tokens"),
        (trace(trace_id="x" * 21), 422, "id_characters"),
        (trace(metadata={"x": [[[[[[[[[1]]]]]]]]]}), 422, "json_depth"),
    ],
)
def test_a_trace_beyond_a_limit_is_told_which(narrow: Api, document: Any, status: int, code: str) -> None:
    answer = narrow.post_trace(document)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert str(NARROW[code.upper()]) in answer.json()["detail"]


def test_a_trace_at_the_limit_is_taken(narrow: Api) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 2
    document = trace(trace_id="x" * 20, messages=messages, calls=[call(10)], metadata={"x": [[[[[[[1]]]]]]]})
    assert narrow.post_trace(document).status_code == 201


def test_a_grade_beyond_its_size_is_refused(narrow: Api) -> None:
    answer = narrow.post_reward(grade("x", comment="y" * 3_000))
    assert (answer.status_code, answer.json()["code"]) == (413, "grade_bytes")


def test_a_batch_of_too_many_is_refused_whole_and_says_what_to_do(narrow: Api) -> None:
    answer = narrow.call("agent", "POST", "/v1/traces/batch", json=[trace() for _ in range(4)])
    assert (answer.status_code, answer.json()["code"]) == (413, "batch_items")
    assert "split" in answer.json()["detail"]


def test_what_inflates_too_far_is_refused(narrow: Api) -> None:
    body = gzip.compress(json.dumps(trace(metadata={"x": "y" * 100_000})).encode())
    answer = send(narrow, "/v1/traces", body, **{"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["code"]) == (413, "inflated_bytes")


def test_an_item_beyond_the_depth_counts_its_own_levels(narrow: Api) -> None:
    """The batch's own two levels are not the item's."""
    body = {"traces": [trace(metadata={"x": [[[[[[[1]]]]]]]}), trace(metadata={"x": [[[[[[[[[1]]]]]]]]]})]}
    results = narrow.call("agent", "POST", "/v1/traces/batch", json=body).json()["results"]
    assert [r.get("status") or r["problem"]["code"] for r in results] == ["accepted", "json_depth"]
