"""Promote, roll back, pin over HTTP; polls and long-polls that cost the database nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from service.database.engine import transaction
from tests.conftest import Api
from tests.service.adapters.lineage import NAME, Lineage

BASE = f"/v1/policies/{NAME}"


@pytest.fixture
def versions(lineage: Lineage) -> Lineage:
    for _ in range(2):
        lineage.step()
    return lineage


class Call(threading.Thread):
    """A request under way."""

    def __init__(self, request: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._request = request
        self.start()

    def run(self) -> None:
        self.answer = self._request()
        self.answered_at = time.monotonic()

    def result(self) -> Any:
        self.join(30)
        return self.answer


def waiting(api: Api) -> int:
    watch = api.client.app.state.context.pointers  # type: ignore[attr-defined]
    return sum(len(each) for each in watch._waiting.values())


def await_waiting(api: Api, count: int) -> None:
    for _ in range(3000):
        if waiting(api) >= count:
            return
        threading.Event().wait(0.01)
    pytest.fail("nobody waits")


def poll(api: Api, pointer: str, unless: int, wait: float = 20) -> Any:
    return api.call("ops", "GET", f"{BASE}/adapters/{pointer}?unless={unless}&wait={wait}")


def test_promote_roll_back_and_rewind_over_http(versions: Lineage, api: Api) -> None:
    back = api.call("ops", "POST", f"{BASE}/rollback", json={"to": 1, "note": "worse"}).json()
    assert (back["before"], back["promoted_version"]) == (2, 1)
    assert api.call("ops", "GET", f"{BASE}/adapters/promoted").json()["version"] == 1
    assert api.call("ops", "GET", f"{BASE}/adapters/latest").json()["version"] == 2
    assert api.call("ops", "POST", f"{BASE}/adapters/2/promote").json()["promoted_version"] == 2
    rewound = api.call("ops", "POST", f"{BASE}/rollback", json={"to": 1, "rewind_trainer": True}).json()
    assert (rewound["head"], rewound["off_branch"]) == (1, [2])
    assert api.call("ops", "GET", f"{BASE}/adapters/latest").json()["version"] == 1
    assert api.call("ops", "GET", f"{BASE}/adapters/2").json()["rewound"] is True
    moves = api.call("ops", "GET", f"{BASE}/pointer-moves").json()["moves"]
    assert moves[0]["reason"] == "rewind by ops"
    assert any(move["reason"] == "rollback by ops: worse" for move in moves)


def exported(api: Api) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in api.client.get("/metrics").text.splitlines()]
    return {name: float(value) for name, _, value in lines if name.endswith(f'_version{{policy="{NAME}"}}')}


def test_the_gauges_go_back_with_the_pointers(versions: Lineage, api: Api) -> None:
    head, promoted = (f'yoro_{pointer}_version{{policy="{NAME}"}}' for pointer in ("head", "promoted"))
    assert exported(api) == {head: 2, promoted: 2}
    api.call("ops", "POST", f"{BASE}/rollback", json={"to": 0})
    assert exported(api) == {head: 2, promoted: 0}
    api.call("ops", "POST", f"{BASE}/rollback", json={"to": 1, "rewind_trainer": True})
    assert exported(api) == {head: 1, promoted: 1}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("adapters/9/promote", {}, 404, "version_not_found"),
        ("rollback", {"to": 9, "rewind_trainer": True}, 404, "version_not_found"),
        ("rollback", {"to": -1}, 422, "invalid"),
        ("rollback", {}, 422, "invalid"),
        ("rollback", {"to": 1, "rewind": True}, 422, "invalid"),
        ("rollback", {"to": 1, "note": "a\u0000b"}, 422, "invalid"),
        ("adapters/9/pin", None, 404, "version_not_found"),
    ],
)
def test_what_cannot_be_done_says_why(
    path: str, body: Any, status: int, code: str, versions: Lineage, api: Api
) -> None:
    answer = api.call("ops", "POST", f"{BASE}/{path}", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_only_ops_move_pointers(versions: Lineage, api: Api) -> None:
    for role in ("agent", "grader", "dashboard", "reader"):
        assert api.call(role, "POST", f"{BASE}/adapters/1/promote").status_code == 403
        assert api.call(role, "POST", f"{BASE}/rollback", json={"to": 0}).status_code == 403


def test_a_pin_is_shown_and_taken_off(versions: Lineage, api: Api) -> None:
    etag = api.call("ops", "GET", f"{BASE}/adapters/1").headers["etag"]
    api.call("ops", "POST", f"{BASE}/adapters/1/pin")
    pinned = api.call("ops", "GET", f"{BASE}/adapters/1", headers={"If-None-Match": etag})
    assert (pinned.status_code, pinned.json()["pinned"]) == (200, True)
    api.call("ops", "DELETE", f"{BASE}/adapters/1/pin")
    assert api.call("ops", "GET", f"{BASE}/adapters/1").json()["pinned"] is False


def test_a_long_poll_ends_as_soon_as_a_step_moves_the_pointer(versions: Lineage, api: Api) -> None:
    call = Call(lambda: poll(api, "latest", 2))
    await_waiting(api, 1)
    versions.step(2)  # committed by another process, as far as the api knows
    committed = time.monotonic()
    assert call.result().json()["version"] == 3
    assert call.answered_at - committed < 2


def test_a_long_poll_ends_downwards_too(versions: Lineage, api: Api) -> None:
    calls = [Call(lambda pointer=pointer: poll(api, pointer, 2)) for pointer in ("latest", "promoted")]
    await_waiting(api, 2)
    api.call("ops", "POST", f"{BASE}/rollback", json={"to": 0, "rewind_trainer": True})
    assert [call.result().json()["version"] for call in calls] == [0, 0]


def test_a_pointer_that_differs_already_is_answered_at_once(versions: Lineage, api: Api) -> None:
    assert poll(api, "latest", 1).json()["version"] == 2
    assert poll(api, "latest", 7).json()["version"] == 2


def test_a_long_poll_over_an_unmoved_pointer_is_304(versions: Lineage, api: Api) -> None:
    answer = poll(api, "promoted", 2, wait=0.2)
    assert (answer.status_code, answer.content) == (304, b"")


def test_the_wait_is_bounded(versions: Lineage, api: Api) -> None:
    assert poll(api, "latest", 2, wait=61).status_code == 422


def test_a_key_revoked_while_it_waits_gets_nothing(versions: Lineage, api: Api) -> None:
    call = Call(lambda: poll(api, "latest", 2, wait=3))
    await_waiting(api, 1)
    prefix = api.keys["ops"][:12]
    with transaction(versions.engine) as connection:
        connection.execute(text("UPDATE api_keys SET revoked_at = now() WHERE name = 'ops'"))
    assert call.result().status_code == 401, prefix


@contextmanager
def counted(engine: Engine, api: Api) -> Iterator[list[str]]:
    """Statements of the api's engine, those of its background readers left out."""
    statements: list[str] = []
    own = api.client.app.state.context.engine  # type: ignore[attr-defined]

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if threading.current_thread().name not in ("directory", "pointers"):
            statements.append(statement)

    event.listen(own, "before_cursor_execute", note)
    yield statements
    event.remove(own, "before_cursor_execute", note)


def test_a_hundred_polls_ask_the_database_nothing(versions: Lineage, api: Api) -> None:
    etag = api.call("ops", "GET", f"{BASE}/adapters/latest").headers["etag"]
    with counted(versions.engine, api) as statements:
        for _ in range(50):
            api.call("ops", "GET", f"{BASE}/adapters/latest", headers={"If-None-Match": etag})
            assert api.call("ops", "GET", f"{BASE}/adapters/latest").json()["version"] == 2
            poll(api, "promoted", 2, wait=0)
    assert statements == []


def test_many_that_wake_at_once_share_one_query(versions: Lineage, api: Api) -> None:
    calls = [Call(lambda: poll(api, "latest", 2)) for _ in range(40)]
    await_waiting(api, 40)
    with counted(versions.engine, api) as statements:
        with transaction(versions.engine) as connection:
            connection.execute(text("UPDATE lineages SET head_version = 1"))
        assert {call.result().json()["version"] for call in calls} == {1}
    assert len(statements) <= 1


def test_pointers_are_found_without_notices(versions: Lineage, api: Api) -> None:
    """A proxy between us and Postgres may swallow LISTEN: the second's reading finds the move."""
    with transaction(versions.engine) as connection:
        connection.execute(text("ALTER TABLE lineages DISABLE TRIGGER USER"))
        connection.execute(text("UPDATE lineages SET head_version = 1"))
    assert poll(api, "latest", 2, wait=10).json()["version"] == 1
