"""Traces, grades, revisions, rule changes, quarantines, erasures, time and batches in random order."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, Engine, text

from service.batches import leases, outcomes
from service.errors import Conflict, Gone
from tests.service.batches.ground import Ground, maintained, make_ground, record, recount
from tests.service.batches.oracle import Oracle

TRACES = [f"t{number}" for number in range(9)]
GRADERS = ["a", "b", "expert"]
VALUES = [0.0, 0.25, 0.5, 1.0]
DURATIONS = [60.0, 150.0, 1200.0]
"""No sum of these is one of the rules' durations, so that nothing happens on the very moment."""
BASE_RULE: dict[str, Any] = {
    "rule": "mean", "weights": {}, "criteria": {}, "require": [], "wait_seconds": 0.0, "settle_seconds": 0.0,
    "expire_seconds": 5000.0, "grade_expire_seconds": 4000.0,
}  # fmt: skip
RULES: list[dict[str, Any]] = [
    {},
    {"rule": "min"},
    {"rule": "weighted", "weights": {"a": 1.0, "expert": 3.0}},
    {"require": ["expert"]},
    {"wait_seconds": 100.0, "settle_seconds": 200.0},
    {"criteria": {"tone": 1.0, "facts": 3.0}},
    {"expire_seconds": 1000.0},
]


class Machine(RuleBasedStateMachine):
    """Drives one policy and the oracle side by side."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.ground: Ground = make_ground(
            self.engine, reward=BASE_RULE, objective={"turn_weight": 0.5},
            batching={"size": 2, "max_ready_batches": 2, "max_staleness": 1},
        )  # fmt: skip
        self.oracle = Oracle(dict(BASE_RULE), {"failed": "exclude", "aborted": "exclude"})
        self.erased: set[str] = set()
        self.erased_rollouts = 0

    @rule(
        trace_id=st.sampled_from(TRACES),
        task=st.sampled_from(["x", "y", "z", None]),
        status=st.sampled_from(["completed", "completed", "failed", "truncated"]),
    )
    def post_trace(self, trace_id: str, task: str | None, status: str) -> None:
        outcome = self.ground.trace(trace_id, task=task, status=status)
        if trace_id in self.erased:
            assert isinstance(outcome, Gone)
        elif not isinstance(outcome, Conflict):
            self.oracle.post_trace(trace_id, status, task or f"task {trace_id}")

    @rule(
        trace_id=st.sampled_from(TRACES),
        grader=st.sampled_from(GRADERS),
        value=st.sampled_from([*VALUES, *VALUES, None]),
        graded_at=st.one_of(st.none(), st.integers(0, 3)),
        criteria=st.sampled_from([None, {"tone": 1.0, "facts": 0.5}, {"tone": 0.25}]),
    )
    def post_grade(
        self, trace_id: str, grader: str, value: float | None, graded_at: int | None, criteria: Any
    ) -> None:
        changes: dict[str, Any] = {} if criteria is None else {"criteria": criteria}
        if graded_at is not None:
            changes["graded_at"] = f"2020-01-01T00:0{graded_at}:00Z"
        outcome = self.ground.grade(trace_id, value, grader, **changes)
        if trace_id in self.erased:
            assert isinstance(outcome, Gone)
        else:
            self.oracle.post_grade(trace_id, grader, value, graded_at, criteria)

    @rule(trace_id=st.sampled_from(TRACES), grader=st.sampled_from(GRADERS), value=st.sampled_from(VALUES))
    def grade_turn(self, trace_id: str, grader: str, value: float) -> None:
        """No gate and no reward hears of it."""
        known = self.oracle.traces.get(trace_id)
        if known is not None and known.received is not None:
            self.ground.grade(trace_id, value, grader, turn=1)

    @rule(
        chosen=st.lists(st.sampled_from(TRACES), min_size=3, max_size=6, unique=True),
        value=st.sampled_from(VALUES),
        graders=st.sampled_from([["a"], ["a", "expert"], GRADERS]),
    )
    def run_agents(self, chosen: list[str], value: float, graders: list[str]) -> None:
        """Several rollouts of different tasks come in with different grades, grade first or trace first."""
        for number, trace_id in enumerate(chosen):
            if number % 2:
                self.post_trace(trace_id, None, "completed")
            for grader in graders:
                self.post_grade(trace_id, grader, (value + number / 4) % 1.25, None, None)
            if number % 2 == 0:
                self.post_trace(trace_id, None, "completed")
            self.grade_turn(trace_id, graders[0], value)

    @rule(change=st.sampled_from(RULES), failed=st.sampled_from(["exclude", "train"]))
    def change_rule(self, change: dict[str, Any], failed: str) -> None:
        self.oracle.reward = BASE_RULE | change
        self.oracle.statuses["failed"] = failed
        self.ground.revise(reward=_patch(self.ground, self.oracle.reward), statuses={"failed": failed})

    @rule(grader=st.sampled_from(GRADERS))
    def quarantine(self, grader: str) -> None:
        if grader in self.oracle.quarantined:
            self.ground.lift(grader)
            self.oracle.quarantined.discard(grader)
        else:
            self.ground.quarantine(grader)
            self.oracle.quarantined.add(grader)

    @rule(trace_id=st.sampled_from(TRACES))
    def erase(self, trace_id: str) -> None:
        known = self.oracle.traces.pop(trace_id, None)
        if known is None and trace_id not in self.erased:
            return
        self.ground.erase(trace_id)
        self.erased.add(trace_id)
        self.erased_rollouts += known is not None and known.received is not None

    @rule(seconds=st.sampled_from(DURATIONS))
    def pass_time(self, seconds: float) -> None:
        self.ground.pass_time(seconds)
        self.oracle.now += seconds

    @rule()
    def settle(self) -> None:
        """The scheduler catches up: every rollout outside of batches is what the oracle says."""
        self.ground.tidy()
        states = self.ground.states()
        self.oracle.settle({trace for trace, (state, reason) in states.items() if _is_beyond(state, reason)})
        for trace_id, trace in self.oracle.traces.items():
            if trace.received is None:
                assert trace_id not in states
            elif not _is_beyond(*states[trace_id]):
                state, reason, reward = self.oracle.expected(trace_id)
                assert states[trace_id] == (state, reason), trace_id
                assert self.ground.reward(trace_id) == (None if reward is None else pytest.approx(reward))
        assert {trace for trace in states if "/" not in trace} == {
            trace_id for trace_id, trace in self.oracle.traces.items() if trace.received is not None
        }

    @rule(end=st.sampled_from([None, "step"]))
    def form(self, end: str | None) -> None:
        """A batch is formed if one is due, and maybe trained: its rewards are those of the oracle."""
        self.settle()
        before = len(self.ground.rows("SELECT id FROM batches WHERE policy_id = :policy"))
        self.ground.form()
        members = self.ground.rows(
            "SELECT r.trace_id, m.reward FROM batch_members m JOIN rollouts r ON r.id = m.rollout_id"
            " JOIN batches b ON b.id = m.batch_id WHERE b.policy_id = :policy AND b.number > :before",
            before=before,
        )
        for member in members:
            assert member.reward == pytest.approx(self.oracle.expected(member.trace_id)[2])
        if end and self._has_ready_batch():
            self.train(end)

    def _has_ready_batch(self) -> bool:
        return bool(self.ground.rows("SELECT 1 FROM batches WHERE policy_id = :policy AND state = 'ready'"))

    @precondition(_has_ready_batch)
    @rule(end=st.sampled_from(["step", "step", "none_trainable", "put_back", "die", "erase_meanwhile"]))
    def train(self, end: str) -> None:
        lease, batch = self.ground.claim()
        if batch is not None and end == "step":
            self.ground.commit(lease, batch)
        elif batch is not None and end == "none_trainable":
            outcomes.end_without_step(self.engine, lease, batch.id, "none_trainable", record(batch))
        elif batch is not None and end == "put_back":
            outcomes.put_back(self.engine, lease, batch.id)
        elif batch is not None and end == "erase_meanwhile":
            names = {row.id: row.trace_id for row in self.ground.rows("SELECT id, trace_id FROM rollouts")}
            self.erase(names[batch.members[0].rollout_id])
            version = self.ground.commit(lease, batch)
            (row,) = self.ground.rows(
                "SELECT tainted FROM policy_versions WHERE policy_id = :policy AND version = :version",
                version=version,
            )
            assert f"erased rollout {batch.members[0].rollout_id}" in row.tainted
        leases.release(self.engine, lease)

    @invariant()
    def everything_holds(self) -> None:
        """Read in one transaction: every step is followed by this."""
        with self.ground.connection() as connection:
            self._every_rollout_is_in_one_state_with_a_reason(connection)
            self._counts_equal_a_recount_and_add_up_to_what_was_posted(connection)
            self._memberships_and_states_agree(connection)
            self._nothing_is_left_of_what_was_erased(connection)
            self._turns_are_of_members(connection)

    def _every_rollout_is_in_one_state_with_a_reason(self, connection: Connection) -> None:
        for row in self._read(connection, "SELECT * FROM rollouts WHERE policy_id = :policy"):
            assert (row.state is None) == (row.arrival is None)
            assert row.state is None or (row.reason == "") == (row.state == "ready")
            assert row.state != "waiting_reward" or row.reward is None
            assert row.reward is None or row.reward_grades, "a reward was invented"

    def _counts_equal_a_recount_and_add_up_to_what_was_posted(self, connection: Connection) -> None:
        counted = maintained(connection, self.ground.policy_id)
        assert counted == recount(connection, self.ground.policy_id)
        posted = sum(trace.received is not None for trace in self.oracle.traces.values())
        grades = ("waiting_for_trace", "late_grades")
        rollouts = sum(amount for (state, _, _), amount in counted.items() if state not in grades)
        assert rollouts == posted + self.erased_rollouts

    def _memberships_and_states_agree(self, connection: Connection) -> None:
        rows = self._read(
            connection,
            "SELECT m.batch_id, m.rollout_id, m.task_key, b.state AS batch, r.state,"
            " coalesce(m.live, false) AS live"
            " FROM rollouts r LEFT JOIN batch_members m ON m.rollout_id = r.id"
            " LEFT JOIN batches b ON b.id = m.batch_id"
            " WHERE r.policy_id = :policy AND (m.batch_id IS NOT NULL OR r.state IN ('batched', 'trained'))",
        )
        live = Counter(row.rollout_id for row in rows if row.live)
        assert not live or max(live.values()) == 1
        tasks = Counter((row.batch_id, row.task_key) for row in rows)
        assert not tasks or max(tasks.values()) == 1
        for row in rows:
            if row.live:
                assert (row.batch, row.state) in (("ready", "batched"), ("trained", "trained"))
            elif row.state in ("batched", "trained"):
                assert live[row.rollout_id] == 1

    def _nothing_is_left_of_what_was_erased(self, connection: Connection) -> None:
        left = self._read(
            connection,
            "SELECT r.id FROM rollouts r LEFT JOIN rollout_documents d ON d.rollout_id = r.id"
            " LEFT JOIN rollout_features f ON f.rollout_id = r.id"
            " WHERE r.policy_id = :policy AND r.erased_at IS NOT NULL"
            " AND (d.rollout_id IS NOT NULL OR f.rollout_id IS NOT NULL OR r.fingerprint IS NOT NULL"
            "      OR r.trace_id = ANY(:traces))",
            traces=TRACES,
        )
        assert left == []

    def _turns_are_of_members(self, connection: Connection) -> None:
        stray = self._read(
            connection,
            "SELECT t.* FROM batch_turns t JOIN batches b ON b.id = t.batch_id"
            " LEFT JOIN batch_members m USING (batch_id, rollout_id)"
            " WHERE b.policy_id = :policy AND (m.batch_id IS NULL OR t.advantage IS NULL)",
        )
        assert stray == []

    def _read(self, connection: Connection, statement: str, **parameters: Any) -> list[Any]:
        named = {"policy": self.ground.policy_id, **parameters}
        return list(connection.execute(text(statement), named).all())


def _is_beyond(state: str, reason: str) -> bool:
    return state in ("batched", "trained") or reason in ("no_signal", "none_trainable", "erased")


def _patch(ground: Ground, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the PATCH that leads to a rule: maps are merged, so entries that are to go are null."""
    before = ground.settings.reward
    return {
        **wanted,
        "weights": dict.fromkeys(before.weights) | wanted["weights"],
        "criteria": dict.fromkeys(before.criteria) | wanted["criteria"],
    }


@pytest.mark.timeout(300)  # a busy machine runs it at a fifth of its speed
def test_invariants_hold_whatever_happens_in_whatever_order(engine: Engine) -> None:
    machine = type("Machine", (Machine,), {"engine": engine})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20, stateful_step_count=40, deadline=None,
            suppress_health_check=list(HealthCheck), print_blob=True,
        ),
    )  # fmt: skip
