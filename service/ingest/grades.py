"""Grades: from the wire to a value in [0, 1], and the rules of their revisions.

Knows the policy's range, no database. Invariant: whatever the order of arrival, the same set of
grades with different `graded_at` leaves the same current grade (design/lifecycle.md, Identities).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from service.eligibility import Reward
from service.errors import FieldError, Invalid
from service.ingest.formats import jsontext, native
from service.ingest.masking import Mask
from service.schemas import EmbeddedGrade, Grade

ROUNDING = 1e-6
"""How far beyond the range a value may lie and still be rounding (tau-bench sends 1.0000001)."""

Key = tuple[int, str, str, int | None]
"""(rollout id, grader, name, turn): what has exactly one current grade."""


@dataclass(frozen=True, slots=True)
class NewGrade:
    """One grade, ready to be written; `value` None retracts."""

    policy_id: int
    trace_id: str
    grader: str
    name: str
    turn: int | None
    value: float | None
    sent_value: float | None
    graded_at: datetime | None
    grader_version: str | None
    criteria: bytes | None
    comment: bytes | None
    warnings: tuple[str, ...]
    metered: bool = False
    """Whether its policy has quotas, so that the writer counts it."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A stored or about-to-be-stored revision; `order` compares first, then `arrival`."""

    arrival: int
    value: float | None
    graded_at: datetime | None
    received_at: datetime

    @property
    def order(self) -> tuple[datetime, int]:
        """Return what the greatest of is current: graded_at or else the receive time, then arrival."""
        return self.graded_at or self.received_at, self.arrival


def prepare(
    grade: Grade, *, policy_id: int, rule: Reward, mask: Mask | None = None, metered: bool = False
) -> NewGrade:
    """Check, map and mask one grade. Raises Invalid for a value outside the policy's range."""
    if grade.void == (grade.value is not None):
        raise Invalid(
            "", [FieldError("/value", "needed, unless `void` is true, and then absent")], code="value"
        )
    value, warnings = (None, []) if grade.value is None else _mapped(grade.value, rule)
    graded_at, time_warnings = _trusted_time(grade.graded_at)
    return NewGrade(
        policy_id=policy_id,
        trace_id=grade.trace_id,
        grader=grade.grader,
        name=grade.name,
        turn=grade.turn,
        value=value,
        sent_value=grade.value,
        graded_at=graded_at,
        grader_version=grade.grader_version,
        criteria=_stored(grade.criteria, mask),
        comment=_stored(grade.comment, mask),
        warnings=(*warnings, *time_warnings),
        metered=metered,
    )


def from_trace(
    embedded: EmbeddedGrade,
    *,
    trace_id: str,
    policy_id: int,
    rule: Reward,
    mask: Mask | None = None,
    metered: bool = False,
) -> NewGrade:
    """Prepare the grade that came along with a trace, like any other; its defects point below /reward."""
    grade = Grade(trace_id=trace_id, **embedded.model_dump())
    try:
        return prepare(grade, policy_id=policy_id, rule=rule, mask=mask, metered=metered)
    except Invalid as error:
        below = [FieldError(f"/reward{defect.pointer}", defect.message) for defect in error.errors]
        raise Invalid(error.detail, below, code=error.code) from error


def is_duplicate(new: NewGrade, history: Iterable[Revision]) -> bool:
    """Tell whether a grade repeats a revision that is already there.

    Without `graded_at` a value equal to any earlier revision is a duplicate delivery; with it, the
    same instant must match too.
    """
    return any(
        revision.value == new.value and (new.graded_at is None or new.graded_at == revision.graded_at)
        for revision in history
    )


def supersedes(new: Revision, current: Revision | None) -> bool:
    """Tell whether a revision becomes the current one. A retraction is undone only with `graded_at`."""
    if current is None:
        return True
    if current.value is None and new.value is not None and new.graded_at is None:
        return False
    return new.order > current.order


def _stored(value: Any, mask: Mask | None) -> bytes | None:
    if value is None:
        return None
    return jsontext.dump(value if mask is None else mask.value(value))


def _mapped(value: float, rule: Reward) -> tuple[float, list[str]]:
    low, high = rule.value_range
    scaled = (value - low) / (high - low)
    if not -ROUNDING <= scaled <= 1 + ROUNDING:
        raise Invalid(
            "",
            [FieldError("/value", f"must lie in [{low:g}, {high:g}], got {value!r}")],
            code="value",
        )
    clamped = min(max(scaled, 0.0), 1.0)
    return clamped, [] if clamped == scaled else [f"/value: {value!r} is rounding, taken as {clamped:g}"]


def _trusted_time(graded_at: datetime | None) -> tuple[datetime | None, list[str]]:
    """Leave out a time that has not come yet: it would outrank every later revision."""
    if graded_at is None:
        return None, []
    moment, warnings = native.in_utc(graded_at), native.time_warnings("/graded_at", graded_at)
    if moment > datetime.now(UTC) + native.SKEW:
        return None, [*warnings, "/graded_at: left out of the order, the receive time stands in"]
    return moment, warnings
