"""`/v1/traces/batch` and `/v1/rewards/batch`: one result each, in order; a bad item voids no other."""

import json
from typing import Any

import pytest
from sqlalchemy import Engine

from tests.conftest import Api
from tests.documents import grade, trace
from tests.service.api.conftest import send, stored


def lines(documents: list[Any]) -> bytes:
    return b"\n".join(d if isinstance(d, bytes) else json.dumps(d).encode() for d in documents)


def post_lines(door: Api, path: str, documents: list[Any], role: str = "agent") -> list[dict[str, Any]]:
    headers = {"Content-Type": "application/x-ndjson"}
    answer = door.call(role, "POST", path, content=lines(documents), headers=headers)
    assert answer.status_code == 207, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def outcome(result: dict[str, Any]) -> Any:
    return result.get("status") or (result["problem"]["status"], result["problem"]["code"])


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_json_array_is_answered_item_by_item_in_order(door: Api, wrapped: bool) -> None:
    sent = [trace() for _ in range(5)]
    body: Any = {"traces": sent} if wrapped else sent
    answer = door.call("agent", "POST", "/v1/traces/batch", json=body)
    assert answer.status_code == 207
    results = answer.json()["results"]
    assert [(r["index"], r["trace_id"], r["status"]) for r in results] == [
        (index, document["trace_id"], "accepted") for index, document in enumerate(sent)
    ]
    assert results[0]["trainability"] == {"verdict": "text", "reasons": []}


BAD_ITEMS = [
    (b'{"trace_id": "a", "trace_id": "b"}', (400, "malformed")),
    (b'{"trace_id": NaN}', (422, "number")),
    (b'{"trace_id": "x", "metadata": {"n": 12345678901234567890123}}', (422, "number")),
    (b'{"metadata": "\\ud800"}', (400, "malformed")),
    (b'{"metadata": {"x": ' + b"[" * 70 + b"]" * 70 + b"}}", (422, "json_depth")),
    (b"null", (422, "invalid")),
    (b"[]", (422, "invalid")),
    (b"7", (422, "invalid")),
    (json.dumps(trace(trace_id="a/b")).encode(), (422, "invalid")),
    (json.dumps(trace(trace_id="x" * 201)).encode(), (422, "id_characters")),
    (json.dumps(trace(policy="nobody")).encode(), (404, "policy_not_found")),
    (json.dumps(trace(reward={"grader": "g", "value": 1.0})).encode(), (403, "role")),
    (json.dumps(trace(metadata={"x": "y" * (8 << 20)})).encode(), (413, "trace_bytes")),
]


@pytest.mark.parametrize(("bad", "expected"), BAD_ITEMS, ids=[str(e) for _, e in BAD_ITEMS])
@pytest.mark.parametrize("form", ["json", "ndjson"])
def test_a_bad_item_has_its_own_problem_and_its_neighbours_are_stored(
    door: Api, rows: Engine, form: str, bad: bytes, expected: tuple[int, str]
) -> None:
    before, after = trace(), trace()
    if form == "ndjson":
        results = post_lines(door, "/v1/traces/batch", [before, bad, after])
    else:
        body = b"[" + b",".join([json.dumps(before).encode(), bad, json.dumps(after).encode()]) + b"]"
        results = send(door, "/v1/traces/batch", body).json()["results"]
    assert [outcome(result) for result in results] == ["accepted", expected, "accepted"]
    assert all(stored(rows, document["trace_id"]) for document in (before, after))


def test_lines_that_are_no_json_concern_themselves_alone(door: Api) -> None:
    results = post_lines(door, "/v1/traces/batch", [trace(), b"{", b"\xff\xfe", b"", trace()])
    assert [outcome(r) for r in results] == ["accepted", (400, "malformed"), (400, "malformed"), "accepted"]


def test_99_new_and_one_duplicate(door: Api) -> None:
    old = trace()
    assert door.post_trace(old).status_code == 201
    sent = [trace() for _ in range(99)]
    results = post_lines(door, "/v1/traces/batch", [*sent[:50], old, *sent[50:]])
    assert [r["status"] for r in results] == ["accepted"] * 50 + ["duplicate"] + ["accepted"] * 49


def test_one_id_twice_in_a_batch_is_a_duplicate_or_a_conflict(door: Api) -> None:
    same, other = trace(), trace()
    results = post_lines(
        door, "/v1/traces/batch", [same, same, other, {**other, "metadata": {"changed": True}}, trace()]
    )
    assert [outcome(r) for r in results] == [
        "accepted", "duplicate", "accepted", (409, "trace_conflict"), "accepted",
    ]  # fmt: skip


def test_items_with_different_optional_fields_are_all_stored(door: Api) -> None:
    sent = [
        trace(),
        trace(task_id="t"),
        trace(session_id="s"),
        trace(tools=[{"name": "x"}]),
        trace(status="failed"),
    ]
    assert [outcome(r) for r in post_lines(door, "/v1/traces/batch", sent)] == ["accepted"] * 5


def test_grades_in_a_batch_are_judged_one_by_one(door: Api, rows: Engine) -> None:
    known = trace()
    door.post_trace(known)
    sent = [
        grade(known["trace_id"], 0.5), grade(known["trace_id"], 0.5), grade("never-seen", 1.0),
        grade("x", 1.5), {**grade("y"), "value": "1"}, b'{"value": NaN}',
    ]  # fmt: skip
    results = post_lines(door, "/v1/rewards/batch", sent, role="grader")
    assert [outcome(r) for r in results] == [
        "accepted", "duplicate", "accepted", (422, "value"), (422, "invalid"), (422, "number"),
    ]  # fmt: skip
    assert [r.get("effect") for r in results[:3]] == ["counts", "counts", "waiting_for_trace"]
    kept = stored(rows, known["trace_id"])
    assert kept is not None
    assert (kept["state"], kept["reward"]) == ("ready", 0.5)


@pytest.mark.parametrize(
    "body", [b"{}", b'{"traces": 5}', b'{"rewards": []}', b'{"traces": [], "x": 1}', b"7"]
)
def test_a_body_that_is_no_batch_is_refused_whole(door: Api, body: bytes) -> None:
    answer = send(door, "/v1/traces/batch", body)
    assert answer.status_code == 422


def test_an_empty_batch_has_no_results(door: Api) -> None:
    assert send(door, "/v1/traces/batch", b"[]").json() == {"results": []}
    assert post_lines(door, "/v1/traces/batch", []) == []


def test_an_odd_id_is_not_echoed(door: Api) -> None:
    results = post_lines(door, "/v1/traces/batch", [trace(trace_id="<script>"), trace(trace_id={"a": 1})])
    assert [result["trace_id"] for result in results] == [None, None]
