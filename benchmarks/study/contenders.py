"""Forms of the estimator that the study compares; the first one is the service's.

Each sees, batch by batch, the kernels of batch and history and their rewards less 1/2, and returns the
baselines less 1/2. Deviations from the service, which cost nothing on calibration sets: no rollout is
excluded but i itself and all are of one version, so the closed form of leaving one out serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from service.baselines.gaussian_process import CONSTANT, NOISE, prior_amplitude
from service.baselines.marginal_likelihood import (
    COMMON_WIDTH,
    FIT_ITERATIONS,
    SCALE_WEIGHT,
    SEPARATE_WIDTH,
    Objective,
)

Array = NDArray[np.float64]
Kernels = Mapping[str, Array]

FAMILY_MEANS = "family_means"
"""Not a kernel but a vector [N]: the mean reward of each point's family, less 1/2."""
SERVED = {name: prior_amplitude(name, 1) for name in ("embedding", "tfidf", "spelling", "local", "length")}


def usual(batches: int) -> bool:
    """Refit when the service does."""
    return batches in (1, 2) or batches % 4 == 0


class Contender(Protocol):
    """One form, on one replay."""

    def predict(self, kernels: Kernels, residuals: Array, size: int) -> Array:
        """Estimate the first `size` residuals, each from all others."""
        ...

    def learn(self, kernels: Kernels, residuals: Array, batches: int) -> None:
        """Take in a window that ends with batch number `batches`."""
        ...


def covariance(kernels: Kernels, amplitudes: Mapping[str, float], noise: Array | float = 1.0) -> Array:
    """A = a_0 + Σ_m a_m k_m + noise."""
    size = len(next(iter(kernels.values())))
    total = np.full((size, size), CONSTANT)
    for name, amplitude in amplitudes.items():
        total += amplitude * kernels[name]
    total.flat[:: size + 1] += noise
    return total


def left_out(total: Array, residuals: Array) -> Array:
    """y_i − [A⁻¹y]_i / [A⁻¹]_ii for every point."""
    precision = cho_solve(cho_factor(total, lower=True), np.eye(len(total)))
    return np.asarray(residuals - (precision @ residuals) / np.diagonal(precision))


@dataclass
class Process:
    """The Gaussian process with these kernels and prior amplitudes."""

    prior: Mapping[str, float] = field(default_factory=lambda: SERVED)
    refit: Callable[[int], bool] = usual
    width: float = SEPARATE_WIDTH

    def __post_init__(self) -> None:
        self._logs = np.log(list(self.prior.values()))

    def predict(self, kernels: Kernels, residuals: Array, size: int) -> Array:
        """See `Contender`."""
        return left_out(covariance(kernels, self.amplitudes()), residuals)[:size]

    def learn(self, kernels: Kernels, residuals: Array, batches: int) -> None:
        """Fit the amplitudes by the service's objective."""
        if not self.refit(batches):
            return
        start = np.log(list(self.prior.values()))
        constant = CONSTANT + np.eye(len(residuals))
        widths = np.full(len(self.prior), self.width)
        objective = Objective(residuals, constant, [kernels[name] for name in self.prior], start, widths)
        options = {"maxiter": FIT_ITERATIONS}
        self._logs = minimize(objective, self._logs, jac=True, method="L-BFGS-B", options=options).x

    def amplitudes(self) -> dict[str, float]:
        """The amplitudes as fitted so far."""
        return dict(zip(self.prior, np.exp(self._logs).tolist(), strict=True))


@dataclass
class UnevenNoise(Process):
    """Noise of a rollout by the process's own prediction p: half constant, half in proportion to p(1−p)."""

    def predict(self, kernels: Kernels, residuals: Array, size: int) -> Array:
        """See `Contender`; the first pass leaves each point out too."""
        first = left_out(covariance(kernels, self.amplitudes()), residuals)
        spread = 0.25 - np.clip(first, -0.45, 0.45) ** 2
        noise = 0.5 + 0.5 * spread / spread.mean()
        return left_out(covariance(kernels, self.amplitudes(), noise), residuals)[:size]


@dataclass
class Recalibrated(Process):
    """Predictions clipped to [0, 1] and bent by a cubic, fitted to those of the last 16 batches."""

    ridge: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._made: list[Array] = []
        self._missed: list[Array] = []

    def predict(self, kernels: Kernels, residuals: Array, size: int) -> Array:
        """See `Contender`; the bend rests on earlier batches."""
        plain = np.clip(super().predict(kernels, residuals, size), -0.5, 0.5)
        bent = plain
        if self._made:
            terms = _cubic(np.concatenate(self._made[-16:]))
            missed = np.concatenate(self._missed[-16:])
            weights = np.linalg.solve(terms.T @ terms + self.ridge * np.eye(3), terms.T @ missed)
            bent = np.clip(plain + _cubic(plain) @ weights, -0.5, 0.5)
        self._made.append(plain)
        self._missed.append(residuals[:size] - plain)
        return np.asarray(bent)


def _cubic(values: Array) -> Array:
    return np.stack([np.ones_like(values), 2.0 * values, (2.0 * values) ** 3], axis=1)


class Mixture:
    """Fifteen processes, not one: five scales of the prior times three tilts, weighed by likelihood."""

    SCALES = (0.2, 0.45, 1.0, 2.2, 5.0)
    TILTS = (1.0, 2.0, 0.5)
    """Embedding times this, length divided by it."""

    def __init__(self) -> None:
        """Start from the prior: log-normal in the scale."""
        self._members = [
            {n: a * scale * {"embedding": tilt, "length": 1.0 / tilt}.get(n, 1.0) for n, a in SERVED.items()}
            for scale in self.SCALES
            for tilt in self.TILTS
        ]
        self._prior = np.repeat(-0.5 * np.log(self.SCALES) ** 2, len(self.TILTS))
        self._weights = _normalised(self._prior)

    def predict(self, kernels: Kernels, residuals: Array, size: int) -> Array:
        """Average the members' predictions."""
        kept = [(w, m) for w, m in zip(self._weights, self._members, strict=True) if w > 0.01]
        made = [w * left_out(covariance(kernels, member), residuals)[:size] for w, member in kept]
        return np.asarray(sum(made) / sum(w for w, _ in kept))

    def learn(self, kernels: Kernels, residuals: Array, batches: int) -> None:
        """Weigh the members by the marginal likelihood of the window."""
        if usual(batches):
            seen = [_log_likelihood(covariance(kernels, member), residuals) for member in self._members]
            self._weights = _normalised(self._prior + np.array(seen))


def _normalised(logs: Array) -> Array:
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def _log_likelihood(total: Array, residuals: Array) -> float:
    factor, lower = cho_factor(total, lower=True)
    spread = residuals @ cho_solve((factor, lower), residuals) + SCALE_WEIGHT * NOISE
    count = len(residuals) + SCALE_WEIGHT
    return float(-0.5 * count * np.log(spread) - np.log(np.diagonal(factor)).sum())


@dataclass
class Softmax:
    """`embedding_softmax`, which has nothing to learn: what the protocol alone does to a ratio."""

    temperature: float = 0.1

    def predict(self, kernels: Kernels, residuals: Array, size: int) -> Array:
        """See `Contender`."""
        logits = kernels["embedding"][:size] / self.temperature
        logits[np.arange(size), np.arange(size)] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(weights @ residuals / weights.sum(axis=1))

    def learn(self, kernels: Kernels, residuals: Array, batches: int) -> None:
        """Nothing."""


class FamilyMeans:
    """What each task's family earns over the whole table, known from the first batch: a limit."""

    def predict(self, kernels: Kernels, residuals: Array, size: int) -> Array:
        """See `Contender`."""
        return kernels[FAMILY_MEANS][:size]

    def learn(self, kernels: Kernels, residuals: Array, batches: int) -> None:
        """Nothing is left to learn."""


class Average:
    """The plain average of process and softmax."""

    def __init__(self) -> None:
        """Make both."""
        self._process, self._softmax = Process(), Softmax()

    def predict(self, kernels: Kernels, residuals: Array, size: int) -> Array:
        """See `Contender`."""
        both = (each.predict(kernels, residuals, size) for each in (self._process, self._softmax))
        return np.asarray(sum(both) / 2.0)

    def learn(self, kernels: Kernels, residuals: Array, batches: int) -> None:
        """Fit the process."""
        self._process.learn(kernels, residuals, batches)


def whole_table(prior: Mapping[str, float], kernels: Kernels, residuals: Array) -> dict[str, float]:
    """Amplitudes fitted to rewards that no cold start has, with a wide prior: a limit, not an estimator."""
    limit = Process(prior, width=2.0 * COMMON_WIDTH)
    limit.learn(kernels, residuals, 1)
    return limit.amplitudes()
