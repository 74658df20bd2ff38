"""The graders' door: values, ranges, revisions, and grades that come along with traces."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from service import keys
from service.database.engine import transaction
from tests.conftest import Api
from tests.documents import grade, trace
from tests.service.api.conftest import make_policy, send, stored


@pytest.mark.parametrize(
    "value",
    [b'"1"', b'"0.5"', b"true", b"false", b"NaN", b"Infinity", b"1e999", b"1.001", b"-0.1", b"[1]", b"{}"],
)
def test_only_a_finite_number_in_the_range_is_a_value(door: Api, rows: Engine, value: bytes) -> None:
    body = b'{"policy": "support", "trace_id": "never", "grader": "g", "value": ' + value + b"}"
    answer = send(door, "/v1/rewards", body, "grader")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/value"
    assert stored(rows, "never") is None


@pytest.mark.parametrize(
    ("sent", "kept"), [(1, 1.0), (0, 0.0), (1 + 1e-7, 1.0), (-1e-7, 0.0), (0.9999999, 0.9999999)]
)
def test_rounding_beyond_the_range_is_taken_with_a_warning(
    door: Api, rows: Engine, sent: float, kept: float
) -> None:
    document = trace()
    door.post_trace(document)
    answer = door.post_reward(grade(document["trace_id"], sent))
    assert answer.status_code == 201
    assert bool(answer.json()["warnings"]) == (not 0 <= sent <= 1)
    row = stored(rows, document["trace_id"])
    assert row is not None
    assert row["reward"] == kept


def test_a_void_with_a_value_and_a_grade_without_one_are_refused(door: Api) -> None:
    assert door.post_reward(grade("x", 1.0, void=True)).status_code == 422
    assert door.post_reward(grade("x", None)).status_code == 422
    assert door.post_reward(grade("x", None, void="yes")).status_code == 422


def test_a_grade_changes_its_own_trace_alone_whatever_they_share(door: Api, rows: Engine) -> None:
    first, second = trace(session_id="s", task_id="t"), trace(session_id="s", task_id="t")
    for document in (first, second):
        door.post_trace(document)
    door.post_reward(grade(second["trace_id"], 0.25))
    rewards = [(stored(rows, d["trace_id"]) or {})["reward"] for d in (first, second)]
    assert rewards == [None, 0.25]


def test_a_grade_dated_in_the_future_is_kept_and_outranks_nothing(door: Api, rows: Engine) -> None:
    document = trace()
    door.post_trace(document)
    ahead = (datetime.now(UTC) + timedelta(days=2)).isoformat()
    answer = door.post_reward(grade(document["trace_id"], 0.25, graded_at=ahead))
    assert answer.status_code == 201
    assert any("future_timestamp" in warning for warning in answer.json()["warnings"])
    door.post_reward(grade(document["trace_id"], 0.75, graded_at=datetime.now(UTC).isoformat()))
    row = stored(rows, document["trace_id"])
    assert row is not None
    assert row["reward"] == 0.75


def test_equal_times_are_ordered_by_arrival(door: Api, rows: Engine) -> None:
    document, moment = trace(), "2026-01-01T00:00:00Z"
    door.post_trace(document)
    for value in (0.25, 0.5):
        door.post_reward(grade(document["trace_id"], value, graded_at=moment))
    row = stored(rows, document["trace_id"])
    assert row is not None
    assert row["reward"] == 0.5


def both_roles(rows: Engine) -> str:
    with transaction(rows) as connection:
        return keys.mint(connection, "both", ["agent", "grader"], ["support"])


def post_as(door: Api, key: str, document: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return door.client.post("/v1/traces", json=document, headers=headers)


def test_an_embedded_reward_needs_the_grader_role(door: Api, rows: Engine) -> None:
    document = trace(reward={"grader": "g", "value": 1.0})
    answer = door.post_trace(document)
    assert (answer.status_code, answer.json()["code"]) == (403, "role")
    assert stored(rows, document["trace_id"]) is None
    assert post_as(door, both_roles(rows), document).status_code == 201
    row = stored(rows, document["trace_id"])
    assert row is not None
    assert (row["state"], row["reward"]) == ("ready", 1.0)


@pytest.mark.parametrize("value", [1.5, "1", True, None])
def test_a_bad_embedded_reward_is_named_and_nothing_is_stored(door: Api, rows: Engine, value: Any) -> None:
    document = trace(reward={"grader": "g", "value": value})
    answer = post_as(door, both_roles(rows), document)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/reward/value"
    assert stored(rows, document["trace_id"]) is None


def test_a_grade_that_came_with_a_conflicting_trace_is_not_of_the_stored_one(door: Api, rows: Engine) -> None:
    key, first = both_roles(rows), trace()
    assert post_as(door, key, first).status_code == 201
    other = {**first, "metadata": {"other": True}, "reward": {"grader": "g", "value": 1.0}}
    assert post_as(door, key, other).status_code == 409
    row = stored(rows, first["trace_id"])
    assert row is not None
    assert (row["state"], row["reward"]) == ("waiting_reward", None)


def test_a_duplicate_trace_may_bring_its_grade(door: Api, rows: Engine) -> None:
    key, first = both_roles(rows), trace()
    assert post_as(door, key, first).status_code == 201
    assert post_as(door, key, {**first, "reward": {"grader": "g", "value": 0.5}}).status_code == 200
    row = stored(rows, first["trace_id"])
    assert row is not None
    assert row["reward"] == 0.5


def test_a_policy_may_declare_another_range(door: Api, rows: Engine) -> None:
    make_policy(rows, "stars", reward={"value_range": [1, 5]})
    document = trace(policy="stars")
    door.post_trace(document)
    assert door.post_reward(grade(document["trace_id"], 0.0, policy="stars")).status_code == 422
    assert door.post_reward(grade(document["trace_id"], 4, policy="stars")).status_code == 201
    row = stored(rows, document["trace_id"], "stars")
    assert row is not None
    assert row["reward"] == 0.75


def test_a_reward_for_an_unknown_trace_waits_and_is_counted(door: Api, rows: Engine) -> None:
    make_policy(rows, "orphans")
    assert door.post_reward(grade("later", policy="orphans")).json()["effect"] == "waiting_for_trace"
    status = door.call("dashboard", "GET", "/v1/policies/orphans/status").json()
    assert status["grades_waiting_for_trace"] == 1
    with transaction(rows) as connection:  # as after a restart and any time: it waits in a table
        assert (
            connection.execute(text("SELECT count(*) FROM rollouts WHERE trace_id = 'later'")).scalar_one()
            == 1
        )
    door.post_trace(trace(trace_id="later", policy="orphans"))
    assert door.call("dashboard", "GET", "/v1/policies/orphans/status").json()["rollouts"]["ready"] == 1
