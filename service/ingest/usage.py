"""What each policy took in today, for its quotas.

Counted in the writer's transaction, so that the count is of what is durable; read by every process
twice a second, so that a quota is overrun by what comes in that time at most.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, text

from service.errors import RateLimited
from service.ingest.intake import Kind
from service.policies import Quotas

_ADD = text("""
INSERT INTO policy_usage AS u (policy_id, day, traces, grades)
SELECT policy_id, (clock_timestamp() AT TIME ZONE 'UTC')::date, traces, grades
FROM unnest(CAST(:policy_id AS bigint[]), CAST(:traces AS bigint[]), CAST(:grades AS bigint[]))
     AS new (policy_id, traces, grades)
ORDER BY policy_id
ON CONFLICT (policy_id, day) DO UPDATE
SET traces = u.traces + excluded.traces, grades = u.grades + excluded.grades
""")

_TODAY = text("""
SELECT policy_id, traces, grades FROM policy_usage WHERE day = (clock_timestamp() AT TIME ZONE 'UTC')::date
""")


@dataclass(frozen=True, slots=True)
class Usage:
    """New documents of the current UTC day."""

    traces: int = 0
    grades: int = 0


def add(connection: Connection, traces: Iterable[int], grades: Iterable[int]) -> None:
    """Count new traces and grades, one policy id each. The last statement: its rows are contended."""
    new_traces, new_grades = Counter(traces), Counter(grades)
    policies = sorted(new_traces | new_grades)
    if policies:
        connection.execute(
            _ADD,
            {
                "policy_id": policies,
                "traces": [new_traces[policy] for policy in policies],
                "grades": [new_grades[policy] for policy in policies],
            },
        )


def today(connection: Connection) -> dict[int, Usage]:
    """Return today's counts by policy id."""
    return {row.policy_id: Usage(row.traces, row.grades) for row in connection.execute(_TODAY)}


def check_quota(policy: str, quotas: Quotas, usage: Usage, kind: Kind) -> None:
    """Raise RateLimited where a policy has taken in what it may take in one UTC day."""
    limit, used = (
        (quotas.traces_per_day, usage.traces) if kind == "traces" else (quotas.grades_per_day, usage.grades)
    )
    if limit is not None and used >= limit:
        raise RateLimited(
            f"Policy {policy!r} has taken in {used} {kind} today, its quota is {limit}",
            code="policy_quota", retry_after_seconds=_seconds_left(datetime.now(UTC)),
        )  # fmt: skip


def _seconds_left(now: datetime) -> int:
    midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return math.ceil((midnight - now).total_seconds())
