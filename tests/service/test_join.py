"""The join of traces and grades over HTTP: order and repetition change nothing."""

import itertools
import threading
from typing import Any

import pytest
from sqlalchemy import Engine, text

from service.database.engine import transaction
from service.eligibility import Reward
from service.ingest import grades, rollouts
from service.ingest.formats import native
from service.ingest.writer import Item, Writer
from service.schemas import Grade, Trace
from tests.conftest import Api, MakePolicy
from tests.databases import await_blocked
from tests.documents import grade, trace


def rollout_rows(engine: Engine) -> list[dict[str, Any]]:
    """What the registry says of each rollout, without times and ids."""
    with transaction(engine) as connection:
        rows = connection.execute(
            text("SELECT trace_id, state, reason, reward, verdict, version, depth FROM rollouts ORDER BY 1")
        ).mappings()
        return [dict(row) for row in rows]


def send(api: Api, kind: str, trace_document: dict[str, Any], grade_document: dict[str, Any]) -> int:
    answer = api.post_trace(trace_document) if kind == "trace" else api.post_reward(grade_document)
    return int(answer.status_code)


@pytest.mark.parametrize(
    "order",
    sorted(
        set(itertools.permutations(["trace", "grade"]))
        | set(itertools.permutations(["trace", "trace", "grade"]))
        | set(itertools.permutations(["trace", "grade", "grade"]))
    ),
)
def test_any_order_and_repetition_ends_the_same(
    order: tuple[str, ...], engine: Engine, make_policy: MakePolicy, api: Api
) -> None:
    make_policy()
    document = trace(trace_id="t")
    seen: set[str] = set()
    for kind in order:
        status = send(api, kind, document, grade("t", 0.75))
        assert status == (200 if kind in seen else 201)
        seen.add(kind)
    assert rollout_rows(engine) == [
        {
            "trace_id": "t", "state": "ready", "reason": "", "reward": 0.75, "verdict": "text",
            "version": 0, "depth": 0,
        }
    ]  # fmt: skip


def test_effect_says_what_the_grade_did(make_policy: MakePolicy, api: Api) -> None:
    make_policy()
    assert api.post_reward(grade("t")).json()["effect"] == "waiting_for_trace"
    api.post_trace(trace(trace_id="t"))
    assert api.post_reward(grade("t", 0.5)).json()["effect"] == "counts"
    old = grade("t", 0.25, graded_at="2020-01-01T00:00:00Z")
    assert api.post_reward(old).json()["effect"] == "superseded"


def test_same_id_with_other_content_is_a_conflict_and_the_first_one_wins(
    engine: Engine, make_policy: MakePolicy, api: Api
) -> None:
    make_policy()
    assert api.post_trace(trace(trace_id="t", metadata={"n": 1})).status_code == 201
    answer = api.post_trace(trace(trace_id="t", metadata={"n": 2}))
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "trace_conflict"
    assert len(rollout_rows(engine)) == 1


def items(policy_id: int) -> tuple[Item, Item]:
    posted = trace(trace_id="t")
    new = rollouts.prepare(
        native.validate(Trace, posted), b"{}", policy_id=policy_id, policy="support", key=b"k"
    )
    graded = grades.prepare(native.validate(Grade, grade("t", 0.5)), policy_id=policy_id, rule=Reward())
    return new, graded


@pytest.mark.parametrize("first", [0, 1])
def test_a_trace_and_its_grade_written_by_two_processes_at_once_cannot_miss_each_other(
    first: int, engine: Engine, make_policy: MakePolicy
) -> None:
    """Both transactions are open at once: the second waits on the registry row until the first commits."""
    pair = items(make_policy().id)
    write_at_once(engine, pair[first], pair[1 - first])
    assert [(row["state"], row["reward"]) for row in rollout_rows(engine)] == [("ready", 0.5)]


def test_two_grades_of_a_trace_that_is_there_cannot_miss_each_other(
    engine: Engine, make_policy: MakePolicy
) -> None:
    """Nothing is inserted or rewritten for them: the row's lock alone makes the second see the first."""
    policy_id = make_policy().id
    new, _ = items(policy_id)
    Writer(engine).write([new])
    two = [native.validate(Grade, grade("t", value, grader=f"g{value}")) for value in (0.0, 0.5)]
    write_at_once(engine, *(grades.prepare(each, policy_id=policy_id, rule=Reward()) for each in two))
    assert [(row["state"], row["reward"]) for row in rollout_rows(engine)] == [("ready", 0.25)]


def write_at_once(engine: Engine, first: Item, second: Item) -> None:
    """Begin the second's transaction before the first's has committed, and see that it waits."""
    holding, go_on = threading.Event(), threading.Event()

    def hold_open() -> None:
        holding.set()
        assert go_on.wait(30)

    slow = Writer(engine, before_commit=hold_open)
    one = threading.Thread(target=slow.write, args=([first],))
    one.start()
    assert holding.wait(30)
    two = threading.Thread(target=Writer(engine).write, args=([second],))
    two.start()
    await_blocked(engine)
    go_on.set()
    one.join(30)
    two.join(30)
