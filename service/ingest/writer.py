"""The one writer: traces and grades of any door into Postgres, many at a time.

Knows no HTTP and no Kafka. Invariants (design/lifecycle.md, The writer): every item first upserts its
(policy, trace_id) registry row, or locks it where it is there, and that lock serialises the join of a
trace and its grade; keys are sorted and tables come in a fixed order, so writers cannot deadlock on
each other; one transaction for all items; data that cannot be written fails the guilty item alone.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InternalError

from service.batches import gates
from service.database.engine import transaction
from service.errors import Conflict, Gone, Invalid, Unavailable, YoroError
from service.ingest import grade_rows, rollout_rows, usage
from service.ingest.grade_rows import GradeWritten
from service.ingest.grades import NewGrade
from service.ingest.rollout_rows import KnownVersions, Registered
from service.ingest.rollouts import NewRollout
from service.schemas import GradeAccepted, TraceAccepted, Trainability

RETRIES = 6
_RETRIED_STATES = {"40001", "40P01"}
"""serialization_failure, deadlock_detected: nothing was written, the same statement may go again."""
_BAD_DATA = (DataError, IntegrityError, UnicodeEncodeError, OverflowError)
"""What one item's data can raise, in the database or on the way there."""

Item = NewRollout | NewGrade
Outcome = TraceAccepted | GradeAccepted | YoroError
Also = Callable[[Connection, list[Outcome]], None]
"""What a caller writes in the items' transaction, from what became of them."""
Registry = dict[rollout_rows.Key, Registered]


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes items; `before_commit` is a seam for the tests that hold transactions open at a barrier."""

    engine: Engine
    before_commit: Callable[[], None] = lambda: None
    _versions: KnownVersions = field(default_factory=dict)

    def write(self, items: Sequence[Item], also: Also | None = None) -> list[Outcome]:
        """Store the items in one transaction and say what became of each, in order.

        `also` writes what must be true together with that; the writer may call it more than once.
        Raises Unavailable when the database cannot take them now: nothing, or everything, is stored,
        and the same call may be repeated.
        """
        write = self._write_all
        for attempt in range(RETRIES):
            try:
                return self._commit(write, items, also)
            except _BAD_DATA:
                write = self._bisect
            except InternalError as error:
                raise Unavailable(f"The database fails: {_reason(error)}") from error
            except DBAPIError as error:
                if _state(error) not in _RETRIED_STATES:
                    raise
            except Unavailable as error:
                if _state(error.__cause__) not in _RETRIED_STATES:
                    raise
                # Jitter parts the writers that met; no test waits for it.
                time.sleep(random.uniform(0, 0.01 * 2**attempt))  # noqa: S311
        raise Unavailable("The database kept refusing concurrent writes")

    def _commit(
        self,
        write: Callable[[Connection, list[Item]], list[Outcome]],
        items: Sequence[Item],
        also: Also | None,
    ) -> list[Outcome]:
        with transaction(self.engine) as connection:
            outcomes = write(connection, list(items)) if items else []
            if also is not None:
                also(connection, outcomes)
            self.before_commit()
        return outcomes

    def _bisect(self, connection: Connection, items: list[Item]) -> list[Outcome]:
        """Write the items; where their data is refused, halve until the guilty one is alone."""
        try:
            with connection.begin_nested():
                return self._write_all(connection, items)
        except _BAD_DATA as error:
            if len(items) == 1:
                return [Invalid(f"This document cannot be stored: {_reason(error)}", code="unstorable")]
        middle = len(items) // 2
        return self._bisect(connection, items[:middle]) + self._bisect(connection, items[middle:])

    def _write_all(self, connection: Connection, items: list[Item]) -> list[Outcome]:
        registry = rollout_rows.register(connection, items, self._versions)
        outcomes = {
            id(item): _trace_outcome(item, registry) for item in items if isinstance(item, NewRollout)
        }
        grades = _grades([item for item in items if _key(item) in registry], outcomes)
        graded = grade_rows.append(connection, grades, registry)
        changed = {row.id for row in registry.values() if row.accepted and _needs_gate(row, row.accepted)}
        changed |= {written.rollout_id for written in graded.values() if written.accepted}
        if changed:
            gates.evaluate(connection, sorted(changed))
        _count(connection, registry, grades, graded)
        return [
            outcomes[id(item)] if isinstance(item, NewRollout) else _grade_outcome(item, graded)
            for item in items
        ]


def _key(item: Item) -> rollout_rows.Key:
    return item.policy_id, item.trace_id


def _needs_gate(row: Registered, item: NewRollout) -> bool:
    """Tell whether registering cannot have said the last word: grades may wait, or its status counts."""
    return not row.inserted or item.status != "completed"


def _trace_outcome(item: NewRollout, registry: Registry) -> TraceAccepted | YoroError:
    row = registry.get(_key(item))
    if row is None:
        return _erased(item)
    if row.accepted is not item and not _is_same(item, row):
        return Conflict(f"Trace {item.trace_id} is already there with other content", code="trace_conflict")
    grade_warnings = () if item.grade is None else item.grade.warnings
    return TraceAccepted(
        trace_id=item.trace_id,
        status="accepted" if row.accepted is item else "duplicate",
        trainability=Trainability(verdict=row.verdict, reasons=row.verdict_reasons),
        warnings=[*item.warnings, *grade_warnings],
    )


def _is_same(item: NewRollout, row: Registered) -> bool:
    """Compare content by the canonicaliser that made the stored fingerprint."""
    version = item.canonicaliser if row.canonicaliser is None else row.canonicaliser
    return row.fingerprint == item.fingerprint_by(version)


def _grades(items: list[Item], outcomes: dict[int, TraceAccepted | YoroError]) -> list[NewGrade]:
    """Return the grades to append: a grade that came with a conflicting trace is of another attempt."""
    found = []
    for item in items:
        if isinstance(item, NewGrade):
            found.append(item)
        elif item.grade is not None and isinstance(outcomes[id(item)], TraceAccepted):
            found.append(item.grade)
    return found


def _erased(item: Item) -> Gone:
    return Gone(f"Trace {item.trace_id} was erased; its id cannot be used again")


def _grade_outcome(item: NewGrade, graded: dict[int, GradeWritten]) -> GradeAccepted | Gone:
    written = graded.get(id(item))
    if written is None:
        return _erased(item)
    return GradeAccepted(
        trace_id=item.trace_id,
        status="accepted" if written.accepted else "duplicate",
        effect=written.effect,
        warnings=list(item.warnings),
    )


def _count(
    connection: Connection, registry: Registry, grades: list[NewGrade], graded: dict[int, GradeWritten]
) -> None:
    traces = [row.accepted for row in registry.values() if row.accepted is not None]
    usage.add(
        connection,
        (item.policy_id for item in traces if item.metered),
        (item.policy_id for item in grades if item.metered and graded[id(item)].accepted),
    )


def _state(error: BaseException | None) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlstate", "") or "")


def _reason(error: BaseException) -> str:
    lines = str(getattr(error, "orig", error)).splitlines()
    return lines[0] if lines else type(error).__name__
