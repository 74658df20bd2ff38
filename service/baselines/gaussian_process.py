"""Gaussian-process baselines: how far each kind of similarity predicts reward is learned.

r_i = m + f(x_i) + ε_i with f ~ GP(0, k), k = a_0 + Σ_m a_m k_m (`kernels`), m = `PRIOR_REWARD`.
b_i is the posterior mean of μ(x_i) given everything but rollout i and its excluded neighbours.
Where features say nothing the amplitudes fall and b_i tends to the mean of the others.

Does not know when to refit (`selection`). Invariants: those of `linear`; an excluded neighbour's
features do not reach the bits of b_i; amplitudes are positive and relative to the noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from service.baselines.features import Task, exclusions
from service.baselines.kernels import CONTEXT, context_fields, task_kernels
from service.baselines.linear import (
    HALF_LIFE_VERSIONS,
    PRIOR_REWARD,
    Baselines,
    Scored,
    ageing,
    weighted_rewards,
)

Matrix = NDArray[np.float64]

MAX_POINTS = 2_048
"""The batch and the newest history up to here enter; a Cholesky factor costs N³/3."""
MAX_ADDED = 64
"""Points that only some rows may see, a row: sessions meet rarely, and each row solves for its own."""
CONSTANT = 25.0
"""a_0: so wide that the mean reward is learned rather than assumed."""
COLD_START: Mapping[str, float] = {
    "embedding": 0.15,
    "tfidf": 0.15,
    "spelling": 0.15,
    "local": 0.15,
    "length": 0.12,
    CONTEXT: 0.15,
}
"""Prior amplitudes relative to the noise; all context fields share the last one."""
NOISE = 0.15
"""Prior σ²_ε: between a coin that is often heads (0.25) and graded rewards (0.05)."""


def prior_amplitude(name: str, fields: int) -> float:
    """The cold-start amplitude of a kernel."""
    return COLD_START[CONTEXT] / fields if name.startswith(CONTEXT) else COLD_START[name]


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """Leave-one-out posterior mean under a sum of kernels; see the module for the model."""

    amplitudes: Mapping[str, float] = field(default_factory=dict)
    """Fitted a_m / σ²_ε by kernel; a kernel without one has its cold-start prior."""
    noise: float = NOISE
    """σ²_ε; scales the variance alone, the weights do not depend on it."""
    half_life: float = HALF_LIFE_VERSIONS
    """Covariance halves for every so many policy versions between two rollouts."""
    name: ClassVar[str] = "gaussian_process"

    @classmethod
    def from_parameters(
        cls, noise: float = NOISE, half_life: float = HALF_LIFE_VERSIONS, **amplitudes: float
    ) -> Self:
        """Rebuild from the parameters stored with a baseline."""
        return cls(amplitudes, noise, half_life)

    @property
    def parameters(self) -> dict[str, float | int | str]:
        """What is stored, and what `from_parameters` takes."""
        return {"noise": self.noise, "half_life": self.half_life, **self.amplitudes}

    def predict(self, batch: Scored, history: Scored) -> Baselines:
        """Estimate each member from the rest of the batch and the newest history."""
        size, window = len(batch.tasks), len(history.tasks)
        weights, precisions = np.zeros((size, size + window)), np.zeros(size)
        everyone = [*batch.tasks, *history.tasks]
        for rows in np.array_split(np.arange(size), -(-size // MAX_POINTS)):
            points = newest_points(rows, size, window)
            tasks = [everyone[k] for k in points.tolist()]
            rows_weights, precisions[rows] = self._weights(tasks, len(rows), size)
            weights[np.ix_(rows, points)] = rows_weights
        constants = PRIOR_REWARD * (1.0 - weights.sum(axis=1))
        values = weighted_rewards(weights, constants, np.concatenate([batch.rewards, history.rewards]))
        variance = self.noise * np.maximum(1.0 / precisions - 1.0, 0.0)
        return Baselines(values, weights, constants, variance, self.name, self.parameters)

    def covariance(self, tasks: Sequence[Task], fitted_on: Sequence[Task], known: Sequence[Task]) -> Matrix:
        """A = k + noise in units of the noise; context fields are those of the `known` tasks."""
        fields = context_fields(known)
        total = np.full((len(tasks), len(tasks)), CONSTANT)
        for name, kernel in task_kernels(tasks, fitted_on, fields).items():
            amplitude = self.amplitudes.get(name, prior_amplitude(name, len(fields)))
            total += np.multiply(kernel, amplitude, out=kernel)
        total *= ageing(tasks, len(tasks), self.half_life)
        total.flat[:: len(tasks) + 1] += 1.0
        return total

    def _weights(self, tasks: Sequence[Task], rows: int, size: int) -> tuple[Matrix, Matrix]:
        excluded = exclusions(tasks, rows)
        shunned = (excluded & ~np.eye(rows, len(tasks), dtype=np.bool_)).any(axis=0)
        order = np.argsort(shunned, kind="stable")
        known = [tasks[k] for k in np.flatnonzero(~shunned).tolist()]
        earlier = [tasks[k] for k in np.flatnonzero(~shunned).tolist() if k >= size]
        covariance = self.covariance([tasks[k] for k in order.tolist()], earlier, known)
        inverse = np.argsort(order, kind="stable")
        weights, precisions = leave_out_weights(covariance, len(known), excluded[:, order], inverse[:rows])
        return weights[:, inverse], precisions


def newest_points(rows: NDArray[np.intp], size: int, window: int) -> NDArray[np.intp]:
    """The rows, the rest of the batch and the newest history: at most `MAX_POINTS` positions."""
    others = np.setdiff1d(np.arange(size), rows)
    newest = np.arange(size + window - 1, size - 1, -1)
    return np.concatenate([rows, others, newest])[:MAX_POINTS]


def leave_out_weights(
    covariance: Matrix, shared: int, excluded: NDArray[np.bool_], places: NDArray[np.intp]
) -> tuple[Matrix, Matrix]:
    """Row i of W = −[(P_SS)⁻¹ P_S,rest]_i with P = A⁻¹ and S = {i} and its excluded neighbours.

    Also 1 / Var(r_i | rest), in units of the noise. `places[i]` is the point of row i. Deviations:
    not taken from A⁻¹ itself, whose rounding would carry an excluded neighbour's features into the
    bits of b_i. The first `shared` points, which every row may see, are factored together by the
    one Cholesky; of the others, each row adds at most `MAX_ADDED` that it may see.
    """
    factor = cho_factor(covariance[:shared, :shared], lower=True, check_finite=False)
    sensitivity = cho_solve(factor, covariance[:shared, shared:])
    residual = covariance[shared:, shared:] - covariance[shared:, :shared] @ sensitivity
    precision_rows = cho_solve(factor, np.eye(shared, int((places < shared).sum()))).T
    weights = np.zeros((len(places), len(covariance)))
    for i, place in enumerate(places.tolist()):
        permitted = np.flatnonzero(~excluded[i, shared:])[:MAX_ADDED]
        if place < shared:
            weights[i, :shared] = precision_rows[place]
            added = sensitivity[place, permitted]
        else:
            permitted = np.concatenate([[place - shared], permitted])
            added = -np.eye(1, len(permitted))[0]
        solved = np.linalg.solve(residual[np.ix_(permitted, permitted)], added)
        weights[i, :shared] += sensitivity[:, permitted] @ solved
        weights[i, shared + permitted] = -solved
    precisions = weights[np.arange(len(places)), places].copy()
    weights /= -precisions[:, None]
    weights[np.arange(len(places)), places] = 0.0
    return weights, precisions
