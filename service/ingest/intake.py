"""From a document of any door to what the writer takes: validate, check limits, find the policy, mask.

Knows the limits and what a sender may do, no door and no database. Invariant: whatever is wrong with
a document is a YoroError that names the field or the limit, and concerns this document alone.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from service.errors import FieldError, Forbidden, Invalid, TooLarge
from service.ingest import grades, rollouts
from service.ingest.formats import native
from service.ingest.grades import NewGrade
from service.ingest.masking import Mask
from service.ingest.rollouts import NewRollout
from service.policies import PolicySettings
from service.schemas import Grade, Trace
from service.settings import Limits

Kind = Literal["traces", "grades"]
GRADE_LEFT_OUT = "/reward: left out, this topic is not trusted for grades"


@dataclass(frozen=True, slots=True)
class Destination:
    """A policy as intake needs it."""

    id: int
    name: str
    settings: PolicySettings
    mask: Mask | None = None


class Sender(Protocol):
    """Whoever a document comes from."""

    @property
    def may_grade(self) -> bool:
        """Tell whether grades that come along with traces are taken."""
        ...

    @property
    def refuses_grades(self) -> bool:
        """Tell whether a grade that is not taken refuses its trace, rather than being left out."""
        ...

    def destination(self, policy: str | None, kind: Kind) -> Destination:
        """Return the policy named, or the sender's only one. Raises what forbids it, RateLimited among it."""
        ...


@dataclass(frozen=True, slots=True)
class Intake:
    """Makes items for the writer out of parsed documents."""

    limits: Limits
    fingerprint_key: bytes

    def trace(self, document: Any, raw: bytes, sender: Sender) -> NewRollout:
        """Prepare one trace and the grade that it carries. Raises YoroError."""
        _check_id(document, self.limits)
        _check("trace_bytes", len(raw), self.limits.trace_bytes)
        trace = native.validate(Trace, document)
        _check("messages", len(trace.messages), self.limits.messages)
        _check("tokens", _tokens(trace), self.limits.tokens)
        policy = sender.destination(trace.policy, "traces")
        item = rollouts.prepare(
            trace, raw,
            policy_id=policy.id, policy=policy.name, key=self.fingerprint_key,
            settings=policy.settings, mask=policy.mask, grade=_embedded(trace, sender, policy),
        )  # fmt: skip
        if trace.reward is not None and item.grade is None:
            return replace(item, warnings=(*item.warnings, GRADE_LEFT_OUT))
        return item

    def grade(self, document: Any, raw: bytes, sender: Sender) -> NewGrade:
        """Prepare one grade. Raises YoroError."""
        _check_id(document, self.limits)
        _check("grade_bytes", len(raw), self.limits.grade_bytes)
        grade = native.validate(Grade, document)
        policy = sender.destination(grade.policy, "grades")
        metered = policy.settings.quotas.grades_per_day is not None
        rule = policy.settings.reward
        return grades.prepare(grade, policy_id=policy.id, rule=rule, mask=policy.mask, metered=metered)


def _embedded(trace: Trace, sender: Sender, policy: Destination) -> NewGrade | None:
    if trace.reward is None:
        return None
    if not sender.may_grade:
        if sender.refuses_grades:
            raise Forbidden("An embedded reward needs the role grader", code="role")
        return None
    return grades.from_trace(
        trace.reward, trace_id=trace.trace_id, policy_id=policy.id, rule=policy.settings.reward,
        mask=policy.mask, metered=policy.settings.quotas.grades_per_day is not None,
    )  # fmt: skip


def _check_id(document: Any, limits: Limits) -> None:
    """Refuse a long id by the limit's own code; its characters are checked with the rest."""
    trace_id = document.get("trace_id") if isinstance(document, dict) else None
    if isinstance(trace_id, str) and len(trace_id) > limits.id_characters:
        message = f"has {len(trace_id)} characters, the limit is {limits.id_characters}"
        raise Invalid(
            f"/trace_id: {message} (id_characters)", [FieldError("/trace_id", message)], code="id_characters"
        )


def _tokens(trace: Trace) -> int:
    return sum(
        len(call.prompt_token_ids or ()) + len(call.completion_token_ids or ()) for call in trace.calls
    )


def _check(name: str, found: int, limit: int) -> None:
    if found > limit:
        message = f"{found} {name.replace('_', ' ')}, the limit is {limit}"
        raise TooLarge(f"The document has {message}", [FieldError("", message)], code=name)
