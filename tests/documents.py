"""Documents as agents and graders post them, with keyword overrides."""

import itertools
from typing import Any

_numbers = itertools.count(1)


def trace(**changes: Any) -> dict[str, Any]:
    """A valid trace of a new task."""
    number = next(_numbers)
    return {
        "policy": "support",
        "trace_id": f"trace-{number}",
        "policy_version": 0,
        "messages": [
            {"role": "user", "content": f"Task {number}: say yes"},
            {"role": "assistant", "content": "yes"},
        ],
        **changes,
    }


def grade(trace_id: str, value: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    """A valid grade."""
    document = {"policy": "support", "trace_id": trace_id, "grader": "tests", "value": value, **changes}
    return {name: given for name, given in document.items() if given is not None}
