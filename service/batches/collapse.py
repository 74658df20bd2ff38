"""Do the newest versions earn far less than those before them, on tasks as difficult?

Reads only; guards.py decides what follows. Rewards of the rollouts in the last `LOOK_BACK` batches,
grouped by the version that sampled them, are split into good (older) and new (from a depth on):

    z = (mean expected - mean earned) / (s sqrt(1/n_new + 1/n_good))

s is the greater of the two sides' standard deviations: rewards that are all 0 have none of their own.
A suspicion is the split of greatest z, with the good side's mean as what is expected. It is confirmed by
the same z where each new rollout's expectation is the Gaussian process's over the good side alone: a
baseline in use sees the other new rollouts, so that its advantages fade as the collapse goes on, and are
0 on average from the first batch on under `leave_one_out`. Harder tasks that look as such explain a drop;
harder tasks that look like any other do not. Rollouts are taken as independent; `make bench-guards`
measures false alarms, also where they are not, and the delay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from service.baselines.estimators import Scored
from service.batches import choices, history
from service.policies import Guards

LOOK_BACK = 64
"""Batches that are looked at."""
LEAST_GOOD = 64
"""Rollouts that a collapse is a collapse from."""
LEAST_NEW = 16
SILENT_SHARE = 0.7
"""Of `collapse_deviations`, once batches have made no step in a row."""
MOST = 512
"""Newest rollouts of each side that confirm a suspicion; beyond them the precision is there anyway."""

_IN_VIEW = """
FROM lineages l
JOIN policies p ON p.id = l.policy_id
JOIN batches b ON b.policy_id = l.policy_id AND b.state <> 'dissolved'
    AND b.number >= greatest(p.guards_from_batch, l.next_batch - :look_back)
JOIN batch_members m ON m.batch_id = b.id
JOIN rollouts r ON r.id = m.rollout_id AND r.erased_at IS NULL
JOIN policy_versions v ON v.policy_id = l.policy_id AND v.version = r.version AND NOT v.rewound
WHERE l.policy_id = :policy
"""

_BY_VERSION = text(f"""
SELECT v.version, v.depth, count(*) AS n, sum(m.reward) AS total, sum(m.reward * m.reward) AS squares
{_IN_VIEW} GROUP BY v.version, v.depth ORDER BY v.depth
""")

_IDS = text(f"""
SELECT r.id, v.depth >= :depth AS new {_IN_VIEW} ORDER BY b.number DESC, m.position
""")

_SILENT = text("""
SELECT count(*) = :count AND bool_and(state = 'no_step') FROM (
    SELECT b.state FROM batches b JOIN policies p ON p.id = b.policy_id
    WHERE b.policy_id = :policy AND b.state IN ('trained', 'no_step') AND b.number >= p.guards_from_batch
    ORDER BY b.number DESC LIMIT :count) AS last
""")


@dataclass(frozen=True, slots=True)
class Sampled:
    """Rewards in view that one version's rollouts earned: how many, their sum and sum of squares."""

    version: int
    depth: int
    n: int
    total: float
    squares: float


@dataclass(frozen=True, slots=True)
class Drop:
    """New rollouts, of versions `first` to `last`, against those up to version `good`."""

    good: int
    first: int
    last: int
    depth: int
    """Depth of `first`."""
    n: int
    expected: float
    earned: float
    deviations: float

    def __str__(self) -> str:
        """Say it to a person."""
        versions = (
            f"version {self.first}" if self.first == self.last else f"versions {self.first}-{self.last}"
        )
        return (
            f"{self.n} rollouts of {versions} earned {self.earned:.3f} on average where {self.expected:.3f} "
            f"was expected ({self.deviations:.1f} standard errors)"
        )


def suspect(connection: Connection, policy_id: int, guards: Guards) -> Drop | None:
    """Return the drop that raw rewards show, if it is great enough to ask how difficult the tasks were."""
    rows = connection.execute(_BY_VERSION, {"policy": policy_id, "look_back": LOOK_BACK})
    drop = greatest_drop([Sampled(*row) for row in rows], guards.collapse_share)
    wanted = _wanted(connection, policy_id, guards)
    return drop if drop is not None and drop.deviations >= wanted else None


def rollouts(connection: Connection, policy_id: int, drop: Drop) -> tuple[list[int], list[int]]:
    """Return the newest good and the newest new rollouts of a drop."""
    named = {"policy": policy_id, "look_back": LOOK_BACK, "depth": drop.depth}
    rows = connection.execute(_IDS, named).all()
    good, new = ([row.id for row in rows if row.new is side][:MOST] for side in (False, True))
    return good, new


def confirm(connection: Connection, policy_id: int, guards: Guards, drop: Drop, encoder: str) -> Drop | None:
    """Return the drop net of how difficult the new tasks were, if it is still great enough.

    Raises VectorMissing: embed the texts of `rollouts` first.
    """
    good_ids, new_ids = rollouts(connection, policy_id, drop)
    good = history.load(connection, good_ids, encoder).scored
    new = history.load(connection, new_ids, encoder).scored
    process = choices.load(connection, policy_id).candidate("gaussian_process")
    # Of one session, they are none of each other's neighbours: each is estimated from the good alone.
    apart = Scored([replace(task, session_id="\0new") for task in new.tasks], new.rewards)
    net = net_drop(drop, good.rewards, new.rewards, process.predict(apart, good).values)
    great = net.deviations >= _wanted(connection, policy_id, guards)
    return net if great and net.earned <= guards.collapse_share * net.expected else None


def net_drop(drop: Drop, good: Any, new: Any, expected: Any) -> Drop:
    """Return the drop with each new rollout's own expectation; arrays of rewards, [n_good] and [n_new]."""
    variance = max(float(np.var(good)), float(np.var(new - expected)))
    error = math.sqrt(variance * (1 / len(new) + 1 / len(good)))
    earned, wanted = float(np.mean(new)), float(np.mean(expected))
    return replace(
        drop, n=len(new), expected=wanted, earned=earned,
        deviations=(wanted - earned) / error if error else 0.0,
    )  # fmt: skip


def greatest_drop(sampled: Sequence[Sampled], share: float) -> Drop | None:
    """Return the split with the greatest z whose new side earned at most `share` of the good side's mean.

    `sampled` by depth, the shallowest version first.
    """
    if len(sampled) < 2:
        return None
    sums = np.array([(each.n, each.total, each.squares) for each in sampled]).T
    n_good, good, spread_good = _moments(sums.cumsum(axis=1)[:, :-1])
    n_new, new, spread_new = _moments((sums.sum(axis=1, keepdims=True) - sums.cumsum(axis=1))[:, :-1])
    variance = np.maximum(spread_good, spread_new)
    far = (n_good >= LEAST_GOOD) & (n_new >= LEAST_NEW) & (new <= share * good) & (variance > 0)
    if not far.any():
        return None
    error = np.sqrt(np.where(far, variance, 1.0) * (1 / n_new + 1 / n_good))
    deviations = np.where(far, (good - new) / error, -np.inf)
    at = int(deviations.argmax())
    return Drop(
        good=sampled[at].version, first=sampled[at + 1].version, last=sampled[-1].version,
        depth=sampled[at + 1].depth, n=int(n_new[at]), expected=float(good[at]), earned=float(new[at]),
        deviations=float(deviations[at]),
    )  # fmt: skip


def _moments(sums: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Counts, means and variances from counts, sums and sums of squares, [3, splits]."""
    n, total, squares = sums
    return n, total / n, squares / n - (total / n) ** 2


def _wanted(connection: Connection, policy_id: int, guards: Guards) -> float:
    """Standard errors that count as a collapse: fewer once batches in a row had nothing to learn from."""
    count = guards.silent_batches
    if count is None:
        return guards.collapse_deviations
    silent = connection.execute(_SILENT, {"policy": policy_id, "count": count}).scalar_one()
    return guards.collapse_deviations * (SILENT_SHARE if silent else 1.0)
