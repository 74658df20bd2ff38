"""What every estimator takes and returns: baselines that are linear in the rewards of others.

b = W·[batch rewards, history rewards] + constants, where W and the constants depend on features
alone. Does not know how W is made (`similarity`, `recurrence`, `gaussian_process`), how history was
chosen (the caller passes the window, oldest first) nor which estimator is best (`selection`).

Invariants: W is exactly zero on the diagonal and at every excluded neighbour, so that changing r_i
leaves b_i bit-identical; nothing is ever NaN; with nothing to go by, b_i = `PRIOR_REWARD`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from service.baselines.features import Task, exclusions

PRIOR_REWARD = 0.5
"""Expected reward of a task before any reward was seen: the middle of [0, 1]."""
HALF_LIFE_VERSIONS = 64.0
"""Versions after which an earlier reward weighs half."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Tasks and the reward that each one's rollout earned, in the same order."""

    tasks: Sequence[Task]
    rewards: NDArray[np.float64]

    def __post_init__(self) -> None:
        if len(self.tasks) != len(self.rewards):
            raise ValueError(f"{len(self.tasks)} tasks but {len(self.rewards)} rewards")
        if not np.isfinite(self.rewards).all():
            raise ValueError("a reward is not finite; leave rollouts without a reward out")


@dataclass(frozen=True, slots=True, eq=False)
class Baselines:
    """The baselines of a batch of B given H rollouts of history, and how they were made."""

    values: NDArray[np.float64]
    """[B]"""
    weights: NDArray[np.float64]
    """[B, B+H], zero on the diagonal and at excluded neighbours."""
    constants: NDArray[np.float64]
    """[B], the part that does not depend on rewards."""
    variance: NDArray[np.float64] | None
    """[B], of the mean reward about b_i, where the estimator knows it."""
    estimator: str
    parameters: Mapping[str, float | int | str]

    @property
    def neighbours(self) -> NDArray[np.float64]:
        """[B], (Σw)²/Σw²: how many equally weighted rollouts each baseline amounts to; 0 without any."""
        squares = (self.weights**2).sum(axis=1)
        return np.asarray(self.weights.sum(axis=1) ** 2 / np.where(squares > 0, squares, 1.0))

    @property
    def fell_back(self) -> NDArray[np.bool_]:
        """[B], whether nothing of the history reached a baseline though there is one."""
        size, everyone = self.weights.shape
        return np.asarray((self.weights[:, size:] == 0).all(axis=1) & (everyone > size))


class Estimator(Protocol):
    """Predicts the rewards of a batch from its other members and from history."""

    @property
    def name(self) -> str:
        """Name in settings, stored with every baseline."""
        ...

    def predict(self, batch: Scored, history: Scored) -> Baselines:
        """Estimate every batch member's expected reward without its own rollout."""
        ...


def weighted_rewards(
    weights: NDArray[np.float64], constants: NDArray[np.float64], rewards: NDArray[np.float64]
) -> NDArray[np.float64]:
    """b_i = Σ_j w_ij r_j + c_i, with terms of zero weight replaced by zero.

    Summed elementwise in a fixed order rather than by a BLAS product, whose order may depend on
    memory alignment: the bits of b_i must not change with r_i.
    """
    terms = np.where(weights == 0.0, 0.0, weights * rewards[None, :])
    return np.asarray(terms.sum(axis=1) + constants)


def linear_baselines(
    estimator: Estimator,
    batch: Scored,
    history: Scored,
    affinities: NDArray[np.float64],
    parameters: Mapping[str, float | int | str],
) -> Baselines:
    """Baselines whose weights are the affinities [B, B+H], masked and normalised a row at a time.

    A row without affinity falls back to the mean of the batch's others, then to that of history,
    then to `PRIOR_REWARD`.
    """
    tasks = [*batch.tasks, *history.tasks]
    allowed = ~exclusions(tasks, len(batch.tasks))
    weights = np.where(allowed, affinities, 0.0)
    in_batch = np.arange(len(tasks)) < len(batch.tasks)
    for fallback in (allowed & in_batch, allowed):
        weights = np.where(weights.any(axis=1, keepdims=True), weights, fallback)
    totals = weights.sum(axis=1)
    constants = np.where(totals > 0.0, 0.0, PRIOR_REWARD)
    weights = weights / np.where(totals > 0.0, totals, 1.0)[:, None]
    rewards = np.concatenate([batch.rewards, history.rewards])
    values = weighted_rewards(weights, constants, rewards)
    return Baselines(values, weights, constants, None, estimator.name, parameters)


def ageing(tasks: Sequence[Task], rows: int, half_life: float) -> NDArray[np.float64]:
    """[rows, N], 2^(−|depth gap| / half_life): what a reward is worth to another policy version."""
    depths = np.array([task.depth for task in tasks], dtype=np.float64)
    distinct, codes = np.unique(depths, return_inverse=True)
    # Few versions, many rollouts: the powers are taken once for each pair of versions.
    worth = 0.5 ** (np.abs(distinct[:, None] - distinct[None, :]) / half_life)
    return np.asarray(worth[codes[:rows, None], codes[None, :]])


def seen_by_all_members(batch: Scored, history: Scored) -> list[Task]:
    """History that every member of the batch may see: scalers and frequencies are fitted on it."""
    excluded = exclusions([*batch.tasks, *history.tasks], len(batch.tasks))
    visible = ~excluded[:, len(batch.tasks) :].any(axis=0)
    return [history.tasks[j] for j in np.flatnonzero(visible).tolist()]
