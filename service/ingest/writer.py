"""The one writer: traces and grades of any door into Postgres, many at a time.

Knows no HTTP and no Kafka. Invariants (design/lifecycle.md, The writer): every item first upserts its
(policy, trace_id) registry row, so that row's lock serialises the join of a trace and its grade;
keys are sorted and tables come in a fixed order, so writers cannot deadlock on each other; one
transaction for all items; a database error on data fails the guilty item alone.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from service.batches import gates
from service.database.engine import transaction
from service.errors import Conflict, Invalid, Unavailable, YoroError
from service.ingest import grade_rows, rollout_rows
from service.ingest.grade_rows import GradeWritten
from service.ingest.grades import NewGrade
from service.ingest.rollout_rows import Registered
from service.ingest.rollouts import NewRollout
from service.schemas import GradeAccepted, TraceAccepted, Trainability

RETRIES = 6
_RETRIED_STATES = {"40001", "40P01"}
"""serialization_failure, deadlock_detected: nothing was written, the same statement may go again."""

Item = NewRollout | NewGrade
Outcome = TraceAccepted | GradeAccepted | YoroError


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes items; `before_commit` is a seam for the tests that hold transactions open at a barrier."""

    engine: Engine
    before_commit: Callable[[], None] = lambda: None

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """Store the items in one transaction and say what became of each, in order.

        Raises Unavailable when the database cannot take them now: nothing, or everything, is stored,
        and the same call may be repeated.
        """
        for attempt in range(RETRIES):
            try:
                return self._write_once(items)
            except DBAPIError as error:
                if _state(error) not in _RETRIED_STATES:
                    raise
            except Unavailable as error:
                if _state(error.__cause__) not in _RETRIED_STATES:
                    raise
            # Jitter parts the writers that met; no test waits for it.
            time.sleep(random.uniform(0, 0.01 * 2**attempt))  # noqa: S311
        raise Unavailable("The database kept refusing concurrent writes")

    def _write_once(self, items: Sequence[Item]) -> list[Outcome]:
        with transaction(self.engine) as connection:
            outcomes = _bisect(connection, list(items))
            self.before_commit()
        return outcomes


def _bisect(connection: Connection, items: list[Item]) -> list[Outcome]:
    """Write the items; where the database refuses their data, halve until the guilty one is alone."""
    try:
        with connection.begin_nested():
            return _write_all(connection, items)
    except (DataError, IntegrityError) as error:
        if len(items) == 1:
            return [Invalid(f"The database refuses this document: {_reason(error)}", code="unstorable")]
    middle = len(items) // 2
    return _bisect(connection, items[:middle]) + _bisect(connection, items[middle:])


def _write_all(connection: Connection, items: list[Item]) -> list[Outcome]:
    registry = rollout_rows.register(connection, items)
    rollout_rows.store_documents(connection, registry)
    graded = grade_rows.append(connection, [item for item in items if isinstance(item, NewGrade)], registry)
    changed = {row.id for row in registry.values() if row.accepted and not row.inserted}
    changed |= {written.rollout_id for written in graded.values() if written.accepted}
    if changed:
        gates.evaluate(connection, sorted(changed))
    return [_outcome(item, registry, graded) for item in items]


def _outcome(
    item: Item,
    registry: dict[tuple[int, str], Registered],
    graded: dict[int, GradeWritten],
) -> Outcome:
    row = registry[item.policy_id, item.trace_id]
    if isinstance(item, NewGrade):
        written = graded[id(item)]
        return GradeAccepted(
            trace_id=item.trace_id,
            status="accepted" if written.accepted else "duplicate",
            effect=written.effect,
            warnings=list(item.warnings),
        )
    if row.fingerprint != item.fingerprint:
        return Conflict(f"Trace {item.trace_id} is already there with other content", code="trace_conflict")
    return TraceAccepted(
        trace_id=item.trace_id,
        status="accepted" if row.accepted is item else "duplicate",
        trainability=Trainability(verdict=row.verdict, reasons=row.verdict_reasons),
        warnings=list(item.warnings),
    )


def _state(error: BaseException | None) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlstate", "") or "")


def _reason(error: DBAPIError) -> str:
    return str(error.orig).splitlines()[0]
