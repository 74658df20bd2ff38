"""Erasure and quarantine: what goes, what stays, what is tainted, what is dissolved."""

import threading
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import Engine, text

from service.batches import erasure, leases, outcomes, quarantine
from service.batches.scheduler import Scheduler
from service.database.engine import transaction
from service.errors import Gone, NotFound
from service.ingest.writer import Writer
from tests.databases import await_blocked
from tests.service.batches.ground import Ground, make_ground
from tests.training_ground import HashingEncoder


def trained(engine: Engine, steps: int) -> Ground:
    """A policy with a chain of versions, two rollouts each."""
    ground = make_ground(engine)
    for number in range(2 * steps):
        ground.trace(f"t{number}", task=f"customer {number}", session_id=f"mail {number}@example.com")
        ground.grade(f"t{number}", number % 2, comment="she said", criteria={"tone": 1})
    for _ in range(steps):
        assert ground.form() == 1
        ground.train()
    return ground


def tainted(ground: Ground) -> dict[int, list[str]]:
    rows = ground.rows("SELECT version, tainted FROM policy_versions WHERE policy_id = :policy")
    return {row.version: list(row.tainted) for row in rows if row.tainted}


def test_nothing_personal_is_left_and_the_versions_grown_from_it_are_tainted(engine: Engine) -> None:
    ground = trained(engine, 3)
    ((rollout,),) = ground.rows("SELECT id FROM rollouts WHERE policy_id = :policy AND trace_id = 't2'")
    erased = ground.erase("t2")
    assert erased.tainted_versions == [2, 3]
    assert tainted(ground) == {2: [f"erased rollout {rollout}"], 3: [f"erased rollout {rollout}"]}
    for table in ("rollouts", "rollout_documents", "rollout_features", "grades", "batch_members"):
        key = "id" if table == "rollouts" else "rollout_id"
        rows = ground.rows(f"SELECT to_jsonb(t)::text FROM {table} t WHERE {key} = {rollout}")  # noqa: S608
        for (row,) in rows:
            assert not any(word in row for word in ("customer", "example.com", "she said", '"t2"'))
    ((state, reason),) = ground.rows(f"SELECT state, reason FROM rollouts WHERE id = {rollout}")  # noqa: S608
    assert (state, reason) == ("trained", "version 2")
    assert ground.form() == 0


def test_versions_grown_later_from_a_tainted_one_are_tainted_too(engine: Engine) -> None:
    ground = trained(engine, 1)
    ground.erase("t0")
    for number in (10, 11):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number % 2)
    assert [ground.form(), ground.train()] == [1, 2]
    assert set(tainted(ground)) == {1, 2}


def test_the_id_cannot_come_back_by_any_door_and_erasing_again_is_harmless(engine: Engine) -> None:
    ground = make_ground(engine)
    ground.trace("t", session_id="s")
    ground.erase("t")
    assert isinstance(ground.trace("t", session_id="s"), Gone)
    assert isinstance(ground.grade("t", 1.0), Gone)
    assert ground.erase("t") == erasure.Erased([], [])
    assert not isinstance(ground.trace("another"), Exception)
    with pytest.raises(NotFound):
        ground.erase("never posted")


def test_grades_that_wait_for_an_erased_trace_go_and_the_trace_cannot_come(engine: Engine) -> None:
    ground = make_ground(engine)
    ground.grade("t", 1.0)
    ground.erase("t")
    assert ground.rows("SELECT id FROM rollouts WHERE policy_id = :policy") == []
    assert isinstance(ground.trace("t"), Gone)


def test_a_trace_posted_while_its_erasure_commits_does_not_come_back(engine: Engine) -> None:
    """The writer's statement began before the erasure committed and waits for the row: it must not insert."""
    ground = make_ground(engine)
    ground.trace("t")
    outcome: list[object] = []
    poster = threading.Thread(target=lambda: outcome.append(ground.trace("t")))
    with transaction(engine) as connection:
        erasure.erase(connection, ground.policy_id, "t")
        poster.start()
        await_blocked(engine)
    poster.join(30)
    assert [type(found) for found in outcome] == [Gone]
    assert "t" not in ground.states()


def test_an_unclaimed_batch_is_dissolved_and_the_others_are_ready_again(engine: Engine) -> None:
    ground = make_ground(engine)
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number)
    assert ground.form() == 1
    assert ground.erase("t0").dissolved_batches == [1]
    assert ground.states()["t1"] == ("ready", "")
    assert ground.rows("SELECT state, outcome FROM batches WHERE policy_id = :policy") == [
        ("dissolved", "member_erased")
    ]


SAME = [
    {"role": "user", "content": "the same words"}, {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "no"},
]  # fmt: skip


def of_one_text(ground: Ground, *trace_ids: str) -> None:
    """Rollouts of different tasks with one text, and a grade of a turn each."""
    for number, trace_id in enumerate(trace_ids):
        ground.trace(trace_id, messages=SAME)
        ground.grade(trace_id, number)
        ground.grade(trace_id, number, turn=3)


@pytest.mark.parametrize("remembers", [True, False])
def test_a_vector_goes_with_every_erasure_and_is_made_again_for_others_of_its_text(
    engine: Engine, *, remembers: bool
) -> None:
    """As history, whose task the scheduler may know from the batch before, and in the dissolved batch."""
    ground = make_ground(engine, baseline={"estimator": "embedding_softmax"}, objective={"turn_weight": 0.5})
    of_one_text(ground, "t0", "t1")
    assert [ground.form(), ground.train()] == [1, 1]
    of_one_text(ground, "t2", "t3")
    assert ground.form() == 1
    count = "SELECT count(*) FROM embeddings"
    assert ground.rows(count) == [(2,)], "one of the rollouts, one of the turns"
    ground.erase("t0")
    assert ground.rows(count) == [(0,)]
    ground.erase("t2")
    ground.trace("t4")
    ground.grade("t4", 1.0)
    scheduler = ground.scheduler if remembers else ground.fresh_scheduler()
    assert scheduler.form(ground.policy_id) is not None
    members = "SELECT rollout_id FROM batch_members m JOIN batches b ON b.id = m.batch_id WHERE b.number = 3"
    ((t3,),) = ground.rows("SELECT id FROM rollouts WHERE trace_id = 't3'")
    assert (t3,) in ground.rows(members)
    assert ground.rows("SELECT turn, note FROM batch_turns WHERE rollout_id = :t3", t3=t3) == [(3, "")] * 2
    made = 2 if remembers else 3
    assert ground.rows(count) == [(made,)], "of t4, of the turn of t3, and of t3 unless its task is known"


class ErasingMeanwhile(HashingEncoder):
    """A trace is erased while the texts of the first look are being embedded."""

    def __init__(self, ground: Ground, trace_id: str) -> None:
        self._ground, self._trace = ground, trace_id

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if self._trace:
            self._ground.erase(self._trace)
            self._trace = ""
        return super().encode(texts)


def test_a_batch_waits_for_a_vector_that_went_with_another_rollout_since_the_look(engine: Engine) -> None:
    ground = make_ground(engine)
    of_one_text(ground, "t0", "t1")
    assert [ground.form(), ground.train()] == [1, 1]
    of_one_text(ground, "t2")
    ground.trace("t3")
    ground.grade("t3", 1.0)
    scheduler = Scheduler(engine, ErasingMeanwhile(ground, "t0"), interval_seconds=1)
    assert scheduler.form(ground.policy_id) is None
    assert scheduler.form(ground.policy_id) is not None


def test_quarantine_stops_counting_taints_and_dissolves_and_lifting_restores(engine: Engine) -> None:
    ground = make_ground(engine, batching={"size": 2, "max_ready_batches": 2})
    for number in range(6):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number % 2, "good" if number < 2 else "rogue")
    assert [ground.form(), ground.train(), ground.form(), ground.train(), ground.form()] == [1, 1, 1, 2, 1]
    done = ground.quarantine("rogue")
    assert (done.tainted_versions, done.dissolved_batches) == ([2], [3])
    assert ground.states()["t4"] == ("waiting_reward", "no_grade")
    ground.lift("rogue")
    assert ground.states()["t4"] == ("ready", "")
    assert tainted(ground) == {2: ["quarantined grader rogue"]}


def test_a_batch_being_trained_when_its_grader_is_quarantined_makes_a_tainted_version(engine: Engine) -> None:
    ground = make_ground(engine)
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number, "rogue")
    assert ground.form() == 1
    lease, batch = ground.claim()
    assert batch is not None
    assert ground.quarantine("rogue").dissolved_batches == []
    assert ground.commit(lease, batch) == 1
    assert tainted(ground) == {1: ["quarantined grader rogue"]}


@pytest.mark.parametrize("turn", [None, 1])
@pytest.mark.parametrize("reported", [True, False])
def test_a_batch_given_back_after_its_grader_was_quarantined_is_dissolved_at_the_next_claim(
    engine: Engine, *, turn: int | None, reported: bool
) -> None:
    ground = make_ground(engine, objective={"turn_weight": 0.5})
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number, "good")
    ground.grade("t1", 0.5, "rogue", turn=turn)
    assert ground.form() == 1
    lease, batch = ground.claim()
    assert batch is not None
    assert ground.quarantine("rogue").dissolved_batches == []
    if reported:
        outcomes.put_back(engine, lease, batch.id)
    leases.release(engine, lease)
    assert ground.train() is None
    assert ground.rows("SELECT state, outcome FROM batches WHERE policy_id = :policy") == [
        ("dissolved", "grader_quarantined")
    ]
    assert [ground.form(), ground.train(), ground.reward("t1"), tainted(ground)] == [1, 1, 1.0, {}]


def test_a_batch_given_back_is_trained_where_the_quarantine_was_lifted_or_is_of_later_grades(
    engine: Engine,
) -> None:
    ground = make_ground(engine)
    for number, grader in enumerate(("rogue", "late")):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number, grader, graded_at="2020-01-01T00:00:00Z")
    assert ground.form() == 1
    lease, batch = ground.claim()
    assert batch is not None
    ground.quarantine("rogue")
    ground.lift("rogue")
    with transaction(engine) as connection:
        quarantine.impose(connection, ground.policy_id, "late", datetime(2020, 1, 2, tzinfo=UTC))
    outcomes.put_back(engine, lease, batch.id)
    leases.release(engine, lease)
    assert ground.train() == 1
    assert tainted(ground) == {}


def test_grades_given_before_the_quarantine_s_time_still_count(engine: Engine) -> None:
    ground = make_ground(engine)
    ground.trace("t")
    ground.grade("t", 1.0, "rogue", graded_at="2020-01-01T00:00:00Z")
    with transaction(engine) as connection:
        connection.execute(
            text(
                "INSERT INTO grader_quarantines (policy_id, grader, since)"
                " VALUES (:id, 'rogue', '2020-01-02Z')"
            ),
            {"id": ground.policy_id},
        )
    ground.revise(reward={"rule": "min"})
    assert ground.states()["t"] == ("ready", "")
    ground.grade("t", 0.5, "rogue", graded_at="2020-01-03T00:00:00Z")
    assert ground.states()["t"] == ("waiting_reward", "no_grade")


def test_a_rollout_erased_while_its_batch_trains_without_a_step_ends_as_erased(engine: Engine) -> None:
    ground = make_ground(engine)
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number)
    ground.form()
    lease, batch = ground.claim()
    assert batch is not None
    ground.erase("t0")
    outcomes.put_back(engine, lease, batch.id)
    assert ground.claim()[1] is None
    assert set(ground.states().values()) == {("excluded", "erased"), ("ready", "")}


def test_writing_many_at_once_refuses_the_erased_one_alone(engine: Engine) -> None:
    ground = make_ground(engine)
    ground.trace("t")
    ground.erase("t")
    graded = [ground.new_grade(trace_id, 1.0) for trace_id in ("x", "t", "y")]
    outcome = Writer(engine).write(graded)
    assert [isinstance(each, Gone) for each in outcome] == [False, True, False]
