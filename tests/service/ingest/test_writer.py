"""The writer: one transaction for many, the guilty item alone fails, no two writers wait in a ring."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from service.database.engine import transaction
from service.errors import Conflict, Invalid
from service.ingest import grades
from service.ingest.formats import native
from service.ingest.rollouts import NewRollout
from service.ingest.writer import Item, Writer
from service.schemas import EmbeddedGrade, GradeAccepted, TraceAccepted
from tests.conftest import MakePolicy
from tests.documents import grade, trace
from tests.service.ingest.conftest import new_grade, new_trace


def status(outcome: object) -> str:
    if isinstance(outcome, TraceAccepted | GradeAccepted):
        return outcome.status
    return (
        "conflict"
        if isinstance(outcome, Conflict)
        else "invalid"
        if isinstance(outcome, Invalid)
        else repr(outcome)
    )


def count(engine: Engine, table: str) -> int:
    with transaction(engine) as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())  # noqa: S608


def with_columns(item: NewRollout, **changes: Any) -> NewRollout:
    columns = dataclasses.replace(item.columns(), **changes)
    return dataclasses.replace(item, columns=lambda: columns)


def spoilt(policy_id: int) -> list[Item]:
    """Items that no validation lets through, each refused in another place."""
    return [
        with_columns(new_trace(policy_id, trace()), task_key="nul\x00"),
        dataclasses.replace(new_trace(policy_id, trace()), session_id="\ud800"),
        dataclasses.replace(new_grade(policy_id, grade("x")), value=7.0),
        dataclasses.replace(new_grade(policy_id, grade("y")), turn=2**40),
        dataclasses.replace(new_trace(policy_id, trace()), policy_id=999),
    ]  # fmt: skip


@pytest.mark.parametrize("at", [0, 5, 11])
def test_the_guilty_items_alone_fail_wherever_they_stand(
    at: int, engine: Engine, make_policy: MakePolicy
) -> None:
    policy = make_policy().id
    good: list[Item] = [new_trace(policy, trace()) for _ in range(11)]
    bad = spoilt(policy)
    outcomes = Writer(engine).write([*good[:at], *bad, *good[at:]])
    assert [status(outcome) for outcome in outcomes] == ["accepted"] * at + ["invalid"] * len(bad) + [
        "accepted"
    ] * (11 - at)
    assert count(engine, "rollouts") == count(engine, "rollout_documents") == 11


def test_two_writers_of_the_same_keys_in_opposite_order_both_finish(
    engine: Engine, make_policy: MakePolicy
) -> None:
    policy = make_policy().id
    documents = [trace() for _ in range(20)]
    barrier = threading.Barrier(4)

    def write(order: int) -> list[str]:
        items: list[Item] = [new_trace(policy, d) for d in documents[::order]]
        items += [new_grade(policy, grade(d["trace_id"], 0.5)) for d in documents[::-order]]
        barrier.wait(30)
        return [status(outcome) for outcome in Writer(engine).write(items)]

    with ThreadPoolExecutor(4) as pool:
        found = [outcome for outcomes in pool.map(write, (1, -1, 1, -1)) for outcome in outcomes]
    assert sorted(set(found)) == ["accepted", "duplicate"]
    assert found.count("accepted") == 40
    assert (count(engine, "rollouts"), count(engine, "grades")) == (20, 20)


def test_fifty_writers_of_one_trace_leave_one_row(engine: Engine, make_policy: MakePolicy) -> None:
    policy, document = make_policy().id, trace()
    barrier = threading.Barrier(10)

    def write(_: int) -> list[str]:
        barrier.wait(30)
        items: list[Item] = [new_trace(policy, document), new_grade(policy, grade(document["trace_id"], 1.0))]
        return [status(outcome) for outcome in Writer(engine).write(items)]

    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(write, range(50)))
    assert sum(trace_status == "accepted" for trace_status, _ in found) == 1
    assert sum(grade_status == "accepted" for _, grade_status in found) == 1
    assert (count(engine, "rollouts"), count(engine, "grades")) == (1, 1)


def statements(engine: Engine, items: list[Item]) -> int:
    seen: list[str] = []

    def note(_c: Connection, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    Writer(engine).write(items)
    event.remove(engine, "before_cursor_execute", note)
    return len(seen)


def test_statements_do_not_grow_with_items_or_steps(engine: Engine, make_policy: MakePolicy) -> None:
    policy = make_policy().id
    long = trace(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 500)
    assert statements(engine, [new_trace(policy, trace())]) == statements(
        engine, [new_trace(policy, long), *(new_trace(policy, trace()) for _ in range(99))]
    )
    graded = [new_grade(policy, grade(f"g{number}")) for number in range(50)]
    assert statements(engine, [new_grade(policy, grade("g"))]) == statements(engine, list(graded))


def test_a_fingerprint_survives_an_upgrade_of_the_canonicaliser(
    engine: Engine, make_policy: MakePolicy
) -> None:
    """A row that an older canonicaliser fingerprinted is compared by that one, which is kept."""
    policy, document = make_policy().id, trace()
    new = new_trace(policy, document)
    older = dataclasses.replace(with_columns(new, fingerprint=b"as the older one made it"), canonicaliser=0)
    assert status(Writer(engine).write([older])[0]) == "accepted"

    def by(version: int) -> bytes:
        return b"as the older one made it" if version == 0 else new.fingerprint_by(version)

    retry = dataclasses.replace(new_trace(policy, document), fingerprint_by=by)
    assert status(Writer(engine).write([retry])[0]) == "duplicate"
    other = new_trace(policy, {**document, "metadata": {"changed": True}})
    other = dataclasses.replace(other, fingerprint_by=lambda version: b"another" if version == 0 else b"")
    assert status(Writer(engine).write([other])[0]) == "conflict"


def test_every_canonicaliser_that_was_ever_used_is_kept() -> None:
    assert sorted(native.CANONICALISERS) == list(range(1, native.CANONICALISER + 1))


def test_an_embedded_grade_of_a_conflicting_trace_is_not_written(
    engine: Engine, make_policy: MakePolicy
) -> None:
    policy, document = make_policy().id, trace()
    attached = new_grade(policy, grade(document["trace_id"], 1.0))
    conflicting = new_trace(policy, {**document, "metadata": {"x": 1}}, grade=attached)
    outcomes = Writer(engine).write([new_trace(policy, document), conflicting])
    assert [status(outcome) for outcome in outcomes] == ["accepted", "conflict"]
    assert count(engine, "grades") == 0


def test_a_version_made_after_its_first_claim_is_known_from_then_on(
    engine: Engine, make_policy: MakePolicy
) -> None:
    policy, writer = make_policy().id, Writer(engine)
    (early,) = writer.write([new_trace(policy, trace(policy_version=1))])
    with transaction(engine) as connection:
        connection.execute(
            text(
                "INSERT INTO policy_versions (policy_id, version, parent, depth, fencing_token, folder) "
                "VALUES (:policy, 1, 0, 1, 1, 'v1')"
            ),
            {"policy": policy},
        )
    (late,) = writer.write([new_trace(policy, trace(policy_version=1))])
    assert isinstance(early, TraceAccepted)
    assert isinstance(late, TraceAccepted)
    assert early.trainability.reasons == ["unknown_version"]
    assert late.trainability.verdict == "text"


def test_a_session_of_another_time_zone_changes_no_instant(engine: Engine, make_policy: MakePolicy) -> None:
    policy = make_policy().id
    with transaction(engine) as connection:
        connection.execute(text(f"ALTER DATABASE {engine.url.database} SET timezone = 'Asia/Seoul'"))
    engine.dispose()
    Writer(engine).write([new_grade(policy, grade("x", graded_at="2026-01-01T00:00:00Z"))])
    with transaction(engine) as connection:
        (stored,) = connection.execute(text("SELECT graded_at FROM grades")).scalars()
    assert stored.isoformat() == "2026-01-01T00:00:00+00:00"


def test_an_embedded_grade_is_a_grade_like_any_other(engine: Engine, make_policy: MakePolicy) -> None:
    policy, document = make_policy(), trace()
    attached = grades.from_trace(
        EmbeddedGrade(grader="tests", value=0.5), trace_id=document["trace_id"], policy_id=policy.id,
        rule=policy.settings.reward,
    )  # fmt: skip
    Writer(engine).write([new_trace(policy.id, document, grade=attached)])
    repeated = new_grade(policy.id, grade(document["trace_id"], 0.5))
    assert status(Writer(engine).write([repeated])[0]) == "duplicate"
