"""Which baseline would have served best: every estimator's errors on the batches that were formed.

Single rollouts are enough: the noise that no baseline can remove is common to all, so the ratio of two
B_eff is the inverse ratio of their mean squared advantages (design/baselines.md, Setting). Errors are
prequential: each batch was scored by what was known before it. Reads only.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, text

from service.baselines.effective_batch import REFERENCE, prequential_ratio

SEED = 0

_ERRORS = text("""
SELECT number, size, estimator, candidate_errors FROM batches
WHERE policy_id = :policy AND candidate_errors IS NOT NULL ORDER BY number DESC LIMIT :batches
""")


@dataclass(frozen=True, slots=True)
class Entry:
    """One estimator's B_eff over that of the batch mean, with its 95 % block-bootstrap interval."""

    estimator: str
    ratio: float
    low: float
    high: float
    batches: int


def compare(connection: Connection, policy_id: int, *, batches: int) -> list[Entry]:
    """Compare the estimators over the last batches, best first; empty before the first batch."""
    rows = connection.execute(_ERRORS, {"policy": policy_id, "batches": batches}).all()[::-1]
    if not rows:
        return []
    names = set.intersection(*(set(row.candidate_errors) for row in rows))
    sums = {name: np.array([row.size * row.candidate_errors[name] for row in rows]) for name in names}
    entries = []
    for name in names:
        found = prequential_ratio(sums[name], sums[REFERENCE], seed=SEED)
        entries.append(Entry(name, found.value, found.low, found.high, len(rows)))
    return sorted(entries, key=lambda entry: (-entry.ratio, entry.estimator))


def in_use(connection: Connection, policy_id: int) -> str | None:
    """Return the estimator that scored the newest batch."""
    rows: Any = connection.execute(_ERRORS, {"policy": policy_id, "batches": 1}).one_or_none()
    return None if rows is None else str(rows.estimator)
