"""Keys: roles, policies, expiry, revocation, rates; and the policies' quotas."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, text

from service import keys
from service.api import directory
from service.api.app import create_app
from service.database.engine import transaction
from service.settings import Settings
from tests.conftest import Api
from tests.documents import grade, trace
from tests.service.api.conftest import make_policy

LOADED_SECONDS = 15.0
"""How long a machine that is busy with other things may take for what else takes half a second."""


def make_key(door: Api, roles: list[str], **more: Any) -> str:
    answer = door.call("admin", "POST", "/v1/keys", json={"name": "k", "roles": roles, **more})
    assert answer.status_code == 201
    return str(answer.json()["key"])


def post(client: TestClient, key: str, path: str, document: Any) -> Any:
    return client.post(path, json=document, headers={"Authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def second(door: Api, module_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Another api process over the same database."""
    folder: Path = tmp_path_factory.mktemp("second")
    with TestClient(create_app(Settings(database_url=module_database, data=folder))) as client:
        yield client


@pytest.mark.parametrize("key", ["", "yoro_", "yoro_default", "admin", "yoro_" + "x" * 43, "é", "Bearer"])
def test_an_unknown_key_is_refused(door: Api, key: str) -> None:
    answer = door.client.post(
        "/v1/traces", json=trace(), headers={b"Authorization": f"Bearer {key}".encode()}
    )
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")


def test_no_key_at_all_and_another_scheme_are_refused(door: Api) -> None:
    assert door.client.post("/v1/traces", json=trace()).status_code == 401
    basic = {"Authorization": f"Basic {door.keys['agent']}"}
    assert door.client.post("/v1/traces", json=trace(), headers=basic).status_code == 401


@pytest.mark.parametrize("role", [role for role in keys.ROLES if role not in ("agent", "admin")])
def test_only_agents_post_traces(door: Api, role: str) -> None:
    answer = door.call(role, "POST", "/v1/traces", json=trace())
    assert (answer.status_code, answer.json()["code"]) == (403, "role")


@pytest.mark.parametrize("role", [role for role in keys.ROLES if role not in ("grader", "admin")])
def test_only_graders_post_grades(door: Api, role: str) -> None:
    for path in ("/v1/rewards", "/v1/rewards/batch"):
        answer = door.call(role, "POST", path, json=grade("x"))
        assert (answer.status_code, answer.json()["code"]) == (403, "role")


def test_a_scoped_key_touches_no_other_policy(door: Api, rows: Engine) -> None:
    make_policy(rows, "other")
    key = make_key(door, ["agent", "grader"], policies=["support"])
    for path, document in (
        ("/v1/traces", trace(policy="other")),
        ("/v1/rewards", grade("x", policy="other")),
    ):
        answer = post(door.client, key, path, document)
        assert (answer.status_code, answer.json()["code"]) == (403, "policy")
        (result,) = post(door.client, key, f"{path}/batch", [document]).json()["results"]
        assert result["problem"]["code"] == "policy"


def test_a_key_of_one_policy_need_not_name_it(door: Api) -> None:
    document = trace()
    del document["policy"]
    assert (
        post(door.client, make_key(door, ["agent"], policies=["support"]), "/v1/traces", document).status_code
        == 201
    )
    answer = post(door.client, make_key(door, ["agent"]), "/v1/traces", document)
    assert answer.json()["errors"][0]["pointer"] == "/policy"


def test_a_revoked_key_fails_within_a_second_on_every_process(door: Api, second: TestClient) -> None:
    key = make_key(door, ["agent"])
    assert post(second, key, "/v1/traces", trace()).status_code == 201
    door.call("admin", "DELETE", f"/v1/keys/{keys.shown(key)}")
    revoked_at = time.monotonic()
    assert post(door.client, key, "/v1/traces", trace()).status_code == 401
    assert directory.REFRESH_SECONDS <= 0.5, "the promise, on a machine that has time for it"
    while post(second, key, "/v1/traces", trace()).status_code != 401:
        assert time.monotonic() - revoked_at < LOADED_SECONDS


def test_an_expired_key_fails_at_once(door: Api, rows: Engine) -> None:
    key = make_key(door, ["agent"], expires_in_days=1)
    assert post(door.client, key, "/v1/traces", trace()).status_code == 201
    with transaction(rows) as connection:
        connection.execute(
            text("UPDATE api_keys SET expires_at = now() - interval '1 s' WHERE digest = :digest"),
            {"digest": keys.digest(key)},
        )
    deadline = time.monotonic() + LOADED_SECONDS
    while post(door.client, key, "/v1/traces", trace()).status_code != 401:
        assert time.monotonic() < deadline


def test_the_key_itself_is_stored_nowhere(door: Api, rows: Engine) -> None:
    key = make_key(door, ["agent"])
    with transaction(rows) as connection:
        found = connection.execute(text("SELECT row_to_json(k)::text FROM api_keys k")).scalars().all()
    assert not any(key in row for row in found)
    listed = door.call("admin", "GET", "/v1/keys").json()["keys"][0]
    assert listed["prefix"] == key[:12]
    assert "digest" not in listed


def test_a_key_beyond_its_rate_waits_as_long_as_it_is_told(door: Api) -> None:
    key = make_key(door, ["agent"], rate_per_second=2)
    answers = [post(door.client, key, "/v1/traces", trace()) for _ in range(12)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert [answer.status_code for answer in answers[:4]] == [201] * 4
    assert refused
    assert refused[0].json()["code"] == "key_rate"
    assert int(refused[0].headers["retry-after"]) >= 1
    assert post(door.client, door.keys["agent"], "/v1/traces", trace()).status_code == 201


def test_a_batch_is_charged_by_its_documents(door: Api) -> None:
    key = make_key(door, ["agent"], rate_per_second=1)
    assert post(door.client, key, "/v1/traces/batch", [trace() for _ in range(50)]).status_code == 207
    answer = post(door.client, key, "/v1/traces", trace())
    assert answer.status_code == 429
    assert 40 <= int(answer.headers["retry-after"]) <= 50


USED = "SELECT u.* FROM policy_usage u JOIN policies p ON p.id = u.policy_id WHERE p.name = :name"


def settle(door: Api, rows: Engine, policy: str, column: str, count: int) -> None:
    """Return once every process has seen today's count."""
    with transaction(rows) as connection:
        used = connection.execute(text(USED), {"name": policy}).mappings().one()
    assert used[column] == count
    door.client.app.state.context.directory.refresh()  # type: ignore[attr-defined]


def test_a_policy_takes_in_no_more_traces_a_day_than_its_quota(door: Api, rows: Engine) -> None:
    make_policy(rows, "small", quotas={"traces_per_day": 3})
    sent = [trace(policy="small") for _ in range(3)]
    for document in sent:
        assert door.post_trace(document).status_code == 201
    assert door.post_trace(sent[0]).status_code == 200, "a duplicate does not count"
    settle(door, rows, "small", "traces", 3)
    answer = door.post_trace(trace(policy="small"))
    assert (answer.status_code, answer.json()["code"]) == (429, "policy_quota")
    assert 0 < int(answer.headers["retry-after"]) <= 86_400
    batch = door.call("agent", "POST", "/v1/traces/batch", json=[trace(policy="small"), trace()]).json()[
        "results"
    ]
    assert [r.get("status") or r["problem"]["status"] for r in batch] == [429, "accepted"]


def test_a_policy_takes_in_no_more_grades_a_day_than_its_quota(door: Api, rows: Engine) -> None:
    make_policy(rows, "graded", quotas={"grades_per_day": 1})
    assert door.post_reward(grade("a", 1.0, policy="graded")).status_code == 201
    settle(door, rows, "graded", "grades", 1)
    assert door.post_reward(grade("b", 1.0, policy="graded")).json()["code"] == "policy_quota"
