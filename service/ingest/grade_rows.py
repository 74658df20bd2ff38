"""Statements on `grades`: append revisions and move the `current` mark.

Must run inside the writer's transaction, with the registry rows locked: that lock makes reading the
history and appending to it one step.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, text

from service.batches import gates
from service.ingest import arrays
from service.ingest.grades import Key, NewGrade, Revision, is_duplicate, supersedes
from service.ingest.rollout_rows import Registered

Effect = Literal["counts", "waiting_for_trace", "superseded", "late"]

_HISTORY = text("""
SELECT id, rollout_id, grader, name, turn, value, graded_at, received_at, current
FROM grades WHERE rollout_id = ANY(:rollouts) ORDER BY id
""")

_DEMOTE = text("UPDATE grades SET current = false WHERE id = ANY(:ids)")

_APPEND = text("""
INSERT INTO grades (rollout_id, grader, name, turn, value, sent_value, criteria, comment,
                    grader_version, graded_at, received_at, current)
SELECT * FROM unnest(CAST(:rollout_id AS bigint[]), CAST(:grader AS text[]), CAST(:name AS text[]),
    CAST(:turn AS integer[]), CAST(:value AS float8[]), CAST(:sent_value AS float8[]),
    CAST(:criteria AS bytea[]), CAST(:comment AS bytea[]), CAST(:grader_version AS text[]),
    CAST(:graded_at AS timestamptz[]), CAST(:received_at AS timestamptz[]), CAST(:current AS boolean[]))
""")

_COUNT_LATE = text("""
UPDATE rollouts r SET late_grades = r.late_grades + late.amount
FROM unnest(CAST(:ids AS bigint[]), CAST(:amounts AS integer[])) AS late (id, amount)
WHERE r.id = late.id
""")


@dataclass(frozen=True, slots=True)
class GradeWritten:
    """What became of one grade."""

    rollout_id: int
    accepted: bool
    effect: Effect


@dataclass(slots=True)
class _History:
    """The revisions of one key while this transaction adds to them."""

    revisions: list[Revision]
    current: Revision | None = None


def append(
    connection: Connection, items: Sequence[NewGrade], registry: dict[tuple[int, str], Registered]
) -> dict[int, GradeWritten]:
    """Append the grades that are no duplicates; return what became of each, by `id(item)`."""
    if not items:
        return {}
    rows = [registry[item.policy_id, item.trace_id] for item in items]
    # A row made just now has no history.
    histories = _read(connection, sorted({row.id for row in rows if not row.inserted}))
    stored_until = {key: history.current for key, history in histories.items()}
    written: dict[int, GradeWritten] = {}
    fresh: list[tuple[Key, NewGrade, Revision]] = []
    for number, (item, row) in enumerate(zip(items, rows, strict=True)):
        key: Key = (row.id, item.grader, item.name, item.turn)
        history = histories[key]
        if is_duplicate(item, history.revisions):
            written[id(item)] = GradeWritten(row.id, accepted=False, effect=_effect(row, superseded=False))
            continue
        # Later than any stored id, in order within this call.
        revision = Revision(2**62 + number, item.value, item.graded_at, row.now)
        wins = supersedes(revision, history.current)
        history.revisions.append(revision)
        history.current = revision if wins else history.current
        fresh.append((key, item, revision))
        written[id(item)] = GradeWritten(row.id, accepted=True, effect=_effect(row, superseded=not wins))
    _store(connection, fresh, histories, stored_until)
    late = Counter(done.rollout_id for done in written.values() if done.accepted and done.effect == "late")
    if late:
        amounts = {"ids": arrays.bigints(late.keys()), "amounts": arrays.integers(late.values())}
        connection.execute(_COUNT_LATE, amounts)
    return written


def _read(connection: Connection, rollouts: list[int]) -> defaultdict[Key, _History]:
    histories: defaultdict[Key, _History] = defaultdict(lambda: _History([]))
    if not rollouts:
        return histories
    for row in connection.execute(_HISTORY, {"rollouts": rollouts}):
        history = histories[row.rollout_id, row.grader, row.name, row.turn]
        revision = Revision(row.id, row.value, row.graded_at, row.received_at)
        history.revisions.append(revision)
        history.current = revision if row.current else history.current
    return histories


def _store(
    connection: Connection,
    fresh: list[tuple[Key, NewGrade, Revision]],
    histories: defaultdict[Key, _History],
    stored_until: dict[Key, Revision | None],
) -> None:
    if not fresh:
        return
    touched = {key for key, _, _ in fresh}
    demoted = [
        before.arrival
        for key in touched
        if (before := stored_until.get(key)) is not None and histories[key].current is not before
    ]
    if demoted:
        connection.execute(_DEMOTE, {"ids": demoted})
    connection.execute(_APPEND, _columns(fresh, histories))


def _columns(
    fresh: list[tuple[Key, NewGrade, Revision]], histories: defaultdict[Key, _History]
) -> dict[str, arrays.Array]:
    items = [item for _, item, _ in fresh]
    return {
        "rollout_id": arrays.bigints(key[0] for key, _, _ in fresh),
        "grader": arrays.texts(item.grader for item in items),
        "name": arrays.texts(item.name for item in items),
        "turn": arrays.integers(item.turn for item in items),
        "value": arrays.floats(item.value for item in items),
        "sent_value": arrays.floats(item.sent_value for item in items),
        "criteria": arrays.byteas(item.criteria for item in items),
        "comment": arrays.byteas(item.comment for item in items),
        "grader_version": arrays.texts(item.grader_version for item in items),
        "graded_at": arrays.moments(item.graded_at for item in items),
        "received_at": arrays.moments(revision.received_at for _, _, revision in fresh),
        "current": arrays.booleans(revision is histories[key].current for key, _, revision in fresh),
    }


def _effect(row: Registered, *, superseded: bool) -> Effect:
    if superseded:
        return "superseded"
    if row.state is None:
        return "waiting_for_trace"
    return "counts" if gates.takes_grades(row.state, row.reason) else "late"
