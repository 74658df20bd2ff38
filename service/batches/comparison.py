"""Is one version better than another in production? Rewards of the rollouts that each sampled.

Raw: mean reward. Net: mean of reward minus the baseline that its batch expected of the task, so that a
version which met easier tasks does not look better for it; only rollouts that were in a batch have
one. Intervals are Welch's: difference +- t sqrt(s_a^2/n_a + s_b^2/n_b), 95 %, with Welch-Satterthwaite
degrees of freedom. Rollouts of one task or one session are not independent: read them as a guide.
"""

import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from service.errors import NotFound

CONFIDENCE = 0.95
_NORMAL_QUANTILE = 1.959963984540054

_EXISTING = text("SELECT version FROM policy_versions WHERE policy_id = :policy AND version = ANY(:versions)")

# The index of the history is entered at the version's birth: nothing that it sampled is older. What has no
# answer, such as a calibration set that was imported, is none of the version's doing.
_RAW = text("""
SELECT count(*) AS n, avg(r.reward) AS mean, var_samp(r.reward) AS variance FROM rollouts r
WHERE r.policy_id = :policy AND r.version = :version AND r.reward IS NOT NULL AND r.arrival IS NOT NULL
  AND r.erased_at IS NULL AND r.reason <> 'untrainable:no_assistant_turn'
  AND r.rewarded_at >= (SELECT created_at FROM policy_versions
                        WHERE policy_id = :policy AND version = :version)
""")

_NET = text("""
SELECT count(*) AS n, avg(m.advantage) AS mean, var_samp(m.advantage) AS variance
FROM rollouts r
JOIN LATERAL (
    -- its last batch: one that was dissolved is only an earlier try
    SELECT m.advantage FROM batch_members m JOIN batches b ON b.id = m.batch_id
    WHERE m.rollout_id = r.id ORDER BY b.number DESC LIMIT 1) AS m ON true
WHERE r.policy_id = :policy AND r.version = :version AND r.reward IS NOT NULL AND r.erased_at IS NULL
  AND r.arrival IS NOT NULL
  AND r.rewarded_at >= (SELECT created_at FROM policy_versions
                        WHERE policy_id = :policy AND version = :version)
""")


@dataclass(frozen=True, slots=True)
class Sample:
    """Mean and unbiased variance of n numbers."""

    n: int
    mean: float | None
    variance: float | None

    def describe(self) -> dict[str, Any]:
        """Return it with its interval, as the API shows it."""
        error = None if self.variance is None else math.sqrt(self.variance / self.n)
        return {"n": self.n, "mean": self.mean, "interval": _interval(self.mean, error, self.n - 1)}


def compare(connection: Connection, policy_id: int, a: int, b: int) -> dict[str, Any]:
    """Compare versions a and b; `difference` is b minus a. Raises NotFound."""
    existing = set(connection.execute(_EXISTING, {"policy": policy_id, "versions": [a, b]}).scalars())
    for version in (a, b):
        if version not in existing:
            raise NotFound(f"There is no version {version}", code="version_not_found")
    return {
        "a": a,
        "b": b,
        "confidence": CONFIDENCE,
        "reward": _both(connection, _RAW, policy_id, a, b),
        "net_of_difficulty": _both(connection, _NET, policy_id, a, b),
    }


def difference(a: Sample, b: Sample) -> dict[str, Any]:
    """Return b - a with Welch's interval; without one where either has fewer than two numbers."""
    if a.mean is None or b.mean is None:
        return {"value": None, "interval": None}
    value = b.mean - a.mean
    if a.variance is None or b.variance is None:
        return {"value": value, "interval": None}
    u, v = a.variance / a.n, b.variance / b.n
    spread = u * u / (a.n - 1) + v * v / (b.n - 1)
    freedom = (u + v) ** 2 / spread if spread else math.inf
    return {"value": value, "interval": _interval(value, math.sqrt(u + v), freedom)}


def t_quantile(freedom: float) -> float:
    """Return Student's t at 97.5 %: exact for 1 and 2 degrees, by Cornish-Fisher's expansion above."""
    if freedom < 2:
        return 12.7062 if freedom < 1.5 else 12.7062 + (4.3027 - 12.7062) * (freedom - 1.0)
    z = _NORMAL_QUANTILE
    if freedom < 3:
        return 4.3027 + (3.1824 - 4.3027) * (freedom - 2.0)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def _both(connection: Connection, statement: Any, policy_id: int, a: int, b: int) -> dict[str, Any]:
    samples = []
    for version in (a, b):
        row = connection.execute(statement, {"policy": policy_id, "version": version}).one()
        samples.append(Sample(row.n, row.mean, row.variance))
    return {
        "a": samples[0].describe(), "b": samples[1].describe(), "difference": difference(*samples),
    }  # fmt: skip


def _interval(centre: float | None, error: float | None, freedom: float) -> list[float] | None:
    if centre is None or error is None or freedom < 1:
        return None
    half = t_quantile(freedom) * error
    return [centre - half, centre + half]
