"""One policy over a real database, driven by hand: post, grade, revise, let time pass, train."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, Engine, text

from service.batches import choices, claims, counts, erasure, gates, leases, outcomes, quarantine
from service.batches.claims import ClaimedBatch
from service.batches.leases import Lease
from service.batches.outcomes import Judgement, Published, Record, Step
from service.batches.scheduler import Scheduler
from service.database import policies
from service.database.engine import transaction
from service.ingest import grades, rollouts
from service.ingest.formats import native
from service.ingest.writer import Outcome, Writer
from service.policies import PolicySettings
from service.schemas import Grade, Trace
from tests.training_ground import HashingEncoder

_numbers = itertools.count(1)

_PASS = (
    "UPDATE rollouts SET received_at = received_at - d, seen_at = seen_at - d, due_at = due_at - d,"
    " rewarded_at = rewarded_at - d, ready_at = ready_at - d"
    " FROM make_interval(secs => :seconds) AS d WHERE policy_id = :policy",
    "UPDATE grades g SET received_at = g.received_at - make_interval(secs => :seconds)"
    " FROM rollouts r WHERE r.id = g.rollout_id AND r.policy_id = :policy",
    "UPDATE batches SET created_at = created_at - make_interval(secs => :seconds) WHERE policy_id = :policy",
    "UPDATE policy_versions SET created_at = created_at - make_interval(secs => :seconds)"
    " WHERE policy_id = :policy",
    "UPDATE gate_counts SET last_at = last_at - make_interval(secs => :seconds) WHERE policy_id = :policy",
    "UPDATE gate_count_changes SET last_at = last_at - make_interval(secs => :seconds)"
    " WHERE policy_id = :policy",
)
"""Time passes by moving everything that has happened into the past: the database's clock decides."""


@dataclass
class Ground:
    """A policy and what may happen to it."""

    engine: Engine
    policy_id: int
    name: str
    settings: PolicySettings
    metrics: dict[str, float] = field(default_factory=lambda: {"reward/mean": 0.5})
    """What its trainer says of every step."""

    @cached_property
    def scheduler(self) -> Scheduler:
        """One scheduler that lives through all that happens, with what it remembers."""
        return self.fresh_scheduler()

    def fresh_scheduler(self) -> Scheduler:
        """Return one that remembers nothing and has not looked for alerts a moment ago."""
        return Scheduler(self.engine, HashingEncoder(), interval_seconds=1)

    def trace(self, trace_id: str, *, task: str | None = None, **changes: Any) -> Outcome:
        """Post a trace; its text is that of its id."""
        document = {
            "trace_id": trace_id, "policy_version": 0, "task_id": task or f"task {trace_id}",
            "messages": [
                {"role": "user", "content": f"{self.name} {trace_id}"},
                {"role": "assistant", "content": "done"},
            ],
            **changes,
        }  # fmt: skip
        new = rollouts.prepare(
            native.validate(Trace, document), b"{}", policy_id=self.policy_id, policy=self.name, key=b"key",
            settings=self.settings,
        )  # fmt: skip
        return Writer(self.engine).write([new])[0]

    def new_grade(self, trace_id: str, value: float | None, grader: str = "a", **changes: Any) -> Any:
        """Return a grade ready to be written; None retracts."""
        document = {"trace_id": trace_id, "grader": grader, **changes}
        document |= {"void": True} if value is None else {"value": value}
        return grades.prepare(
            native.validate(Grade, document), policy_id=self.policy_id, rule=self.settings.reward
        )

    def grade(self, trace_id: str, value: float | None, grader: str = "a", **changes: Any) -> Outcome:
        """Post a grade; None retracts."""
        return Writer(self.engine).write([self.new_grade(trace_id, value, grader, **changes)])[0]

    def revise(self, **changes: Any) -> None:
        """Change settings as `PATCH /v1/policies/{p}` does."""
        with transaction(self.engine) as connection:
            policies.revise(connection, self.policy_id, changes)
            gates.evaluate_policy(connection, self.policy_id)
        merged = policies._merge(self.settings.model_dump(mode="json"), changes)
        self.settings = PolicySettings.model_validate(merged)

    def erase(self, trace_id: str) -> erasure.Erased:
        """Erase a trace."""
        with transaction(self.engine) as connection:
            return erasure.erase(connection, self.policy_id, trace_id)

    def quarantine(self, grader: str) -> quarantine.Quarantined:
        """Stop counting a grader."""
        with transaction(self.engine) as connection:
            return quarantine.impose(connection, self.policy_id, grader, None)

    def lift(self, grader: str) -> None:
        """Count a grader again."""
        with transaction(self.engine) as connection:
            quarantine.lift(connection, self.policy_id, grader)

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        with transaction(self.engine) as connection:
            for statement in _PASS:
                connection.execute(text(statement), {"seconds": seconds, "policy": self.policy_id})

    def tidy(self) -> None:
        """Let gates, expiry and overload catch up, without forming a batch."""
        with transaction(self.engine) as connection:
            gates.evaluate_due(connection)
            counts.fold(connection)
        self.scheduler._tidy(self.policy_id)

    def form(self) -> int:
        """Form a batch if one is due; return how many were formed."""
        self.scheduler._advance(self.policy_id)
        formed = self.scheduler.form(self.policy_id)
        if formed is not None:
            choices.observe(self.engine, formed)
        return int(formed is not None)

    def claim(self) -> tuple[Lease, ClaimedBatch | None]:
        """Take the lease and the next batch."""
        lease = leases.claim(self.engine, self.policy_id, "trainer", 60.0)
        assert lease is not None
        return lease, claims.claim_batch(self.engine, lease)

    def commit(self, lease: Lease, batch: ClaimedBatch, **rejected: str) -> int:
        """Finish a step as a trainer does; return the version."""
        version = batch.head.next_version
        outcomes.commit_step(
            self.engine, lease,
            Step(
                batch.id, batch.head.version, version, published(version),
                record(batch, rejected, self.metrics),
            ),
        )  # fmt: skip
        return version

    def train(self) -> int | None:
        """Train the next batch, if there is one; return the version."""
        lease, batch = self.claim()
        version = None if batch is None else self.commit(lease, batch)
        leases.release(self.engine, lease)
        return version

    def rows(self, statement: str, **parameters: Any) -> list[Any]:
        """Read."""
        with transaction(self.engine) as connection:
            return list(connection.execute(text(statement), {"policy": self.policy_id, **parameters}).all())

    def states(self) -> dict[str, tuple[str, str]]:
        """State and reason by trace id."""
        found = self.rows(
            "SELECT trace_id, state, reason FROM rollouts WHERE policy_id = :policy AND state IS NOT NULL"
        )
        return {row.trace_id: (row.state, row.reason) for row in found}

    def reward(self, trace_id: str) -> float | None:
        """The reward of a rollout as stored."""
        ((reward,),) = self.rows(
            "SELECT reward FROM rollouts WHERE policy_id = :policy AND trace_id = :trace", trace=trace_id
        )
        return None if reward is None else float(reward)

    def connection(self) -> Any:
        """A transaction."""
        return transaction(self.engine)


def make_ground(engine: Engine, **settings: Any) -> Ground:
    """Create a policy of its own; batches of two unless settings say otherwise."""
    name = f"policy-{next(_numbers)}"
    document = {
        "base_model": "smollm2-135m", "baseline": {"estimator": "leave_one_out"},
        "batching": {"size": 2, "max_ready_batches": 1}, **settings,
    }  # fmt: skip
    made = PolicySettings.model_validate(document)
    with transaction(engine) as connection:
        return Ground(engine, policies.create(connection, name, made), name, made)


def record(
    batch: ClaimedBatch, rejected: Mapping[str, str] | None = None, metrics: Mapping[str, float] | None = None
) -> Record:
    """What a trainer says of a batch in which every member trained."""
    return Record({member.rollout_id: Judgement("text") for member in batch.members}, 8, metrics or {})


def published(version: int) -> Published:
    """Files that nobody looks at."""
    return Published(f"v{version}", {"version": version}, "0" * 64, f"{version:064x}")


def recount(connection: Connection, policy_id: int) -> dict[tuple[str, str, int], int]:
    """Count from the rows what the maintained counts say."""
    rows = connection.execute(
        text("""
        SELECT state, CASE WHEN state = 'batched' THEN ''
                           WHEN state = 'trained' AND erased_at IS NOT NULL THEN 'erased'
                           WHEN state = 'trained' AND reason LIKE 'version %' THEN '' ELSE reason END,
               CASE WHEN state = 'ready' THEN depth ELSE -1 END, count(*)
        FROM rollouts WHERE policy_id = :policy AND state IS NOT NULL GROUP BY 1, 2, 3
        UNION ALL SELECT 'waiting_for_trace', '', -1, count(*) FROM grades g
        JOIN rollouts r ON r.id = g.rollout_id
        WHERE r.policy_id = :policy AND r.state IS NULL AND g.current HAVING count(*) > 0
        UNION ALL SELECT 'late_grades', '', -1, sum(late_grades) FROM rollouts
        WHERE policy_id = :policy HAVING sum(late_grades) > 0
    """),
        {"policy": policy_id},
    )
    return {(row[0], row[1], row[2]): int(row[3]) for row in rows}


def maintained(connection: Connection, policy_id: int) -> dict[tuple[str, str, int], int]:
    """Return the maintained counts in the same shape, without what leaves no row behind."""
    return {
        (count.state, count.reason, count.depth): count.amount
        for count in counts.read(connection, policy_id)
        if count.state not in ("grader", "expired_grades")
    }
