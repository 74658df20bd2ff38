"""Items for the writer, made the way intake makes them."""

from typing import Any

from service.eligibility import Reward
from service.ingest import grades, rollouts
from service.ingest.formats import jsontext, native
from service.ingest.grades import NewGrade
from service.ingest.rollouts import NewRollout
from service.schemas import Grade, Trace


def new_trace(policy_id: int, document: dict[str, Any], **more: Any) -> NewRollout:
    """Prepare a trace."""
    body = jsontext.as_sent(document)
    return rollouts.prepare(
        native.validate(Trace, document), body, policy_id=policy_id, policy="support", key=b"k" * 32, **more
    )


def new_grade(policy_id: int, document: dict[str, Any], **more: Any) -> NewGrade:
    """Prepare a grade."""
    return grades.prepare(native.validate(Grade, document), policy_id=policy_id, rule=Reward(), **more)


__all__ = ["new_grade", "new_trace"]
