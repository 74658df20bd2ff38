"""Learn the amplitudes of a Gaussian process from rewards of past batches.

Minimises, over log amplitudes, the negative log marginal likelihood with the overall scale σ²
integrated out, plus a normal prior that pulls towards the cold start:

    ½ (n+ν) ln(yᵀA⁻¹y + ν σ²_0) + ½ ln|A| + ½ dᵀ(c² 11ᵀ + diag s²)⁻¹ d,   d_m = ln a_m − ln a⁰_m

with y = r − m, A = a_0 + Σ_m a_m k_m + I (Rasmussen and Williams 2006, §5.4). Deviations: σ² has a
scaled inverse-χ² prior of ν = 6, so that a run of equal rewards does not make it zero; amplitudes
have a normal prior, wide for all together and narrow for each, so that a few dozen rewards can tell
that features say nothing without telling yet which of them does. Knows nothing of batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.optimize import minimize

from service.baselines.gaussian_process import (
    CONSTANT,
    NOISE,
    GaussianProcess,
    Matrix,
    prior_amplitude,
)
from service.baselines.kernels import CONTEXT, context_fields, task_kernels
from service.baselines.linear import PRIOR_REWARD, Scored, ageing

FIT_POINTS = 512
"""Newest rollouts that a fit reads: 16 batches of 32."""
FIT_ITERATIONS = 12
COMMON_WIDTH = 2.0
"""c: one standard deviation is a factor of 7.4 in all amplitudes together."""
SEPARATE_WIDTH = 0.5
"""s_m: one standard deviation is a factor of 1.65 in one amplitude against the others."""
CONTEXT_WIDTH = 1.5
"""s_m of context fields: an owner sends customer and request number alike, one telling, one not."""
SCALE_WEIGHT = 6.0
"""ν: the prior on σ² counts as so many rollouts."""


def fitted(process: GaussianProcess, history: Scored) -> GaussianProcess:
    """The process with amplitudes and noise fitted to history, started from its present ones."""
    tasks = list(history.tasks[-FIT_POINTS:])
    if len(tasks) < 2:
        return process
    fields = context_fields(tasks)
    kernels = task_kernels(tasks, tasks, fields)
    decay = ageing(tasks, len(tasks), process.half_life)
    objective = Objective(
        residuals=history.rewards[-FIT_POINTS:] - PRIOR_REWARD,
        constant=CONSTANT * decay + np.eye(len(tasks)),
        kernels=[kernel * decay for kernel in kernels.values()],
        prior=np.log([prior_amplitude(name, len(fields)) for name in kernels]),
        widths=np.array([CONTEXT_WIDTH if name.startswith(CONTEXT) else SEPARATE_WIDTH for name in kernels]),
    )
    start = [process.amplitudes.get(n, prior_amplitude(n, len(fields))) for n in kernels]
    options = {"maxiter": FIT_ITERATIONS}
    found = minimize(objective, np.log(start), jac=True, method="L-BFGS-B", options=options).x
    amplitudes: Mapping[str, float] = dict(zip(kernels, np.exp(found).tolist(), strict=True))
    return GaussianProcess(amplitudes, objective.noise(found), process.half_life)


class Objective:
    """The penalised negative log marginal likelihood and its gradient; see the module."""

    def __init__(
        self,
        residuals: Matrix,
        constant: Matrix,
        kernels: Sequence[Matrix],
        prior: Matrix,
        widths: Matrix,
    ) -> None:
        self._residuals = residuals
        self._constant = constant
        self._kernels = kernels
        self._prior = prior
        self._prior_precision = np.linalg.inv(COMMON_WIDTH**2 + np.diag(widths**2))
        self._count = len(residuals) + SCALE_WEIGHT

    def __call__(self, log_amplitudes: Matrix) -> tuple[float, Matrix]:
        """Value and gradient: ½ a_m Σ (A⁻¹ − (n+ν) ααᵀ/q) ∘ k_m + prior, with α = A⁻¹y."""
        precision, log_determinant = self._precision(log_amplitudes)
        alpha = precision @ self._residuals
        spread = self._spread(alpha)
        offsets = log_amplitudes - self._prior
        pulls = self._prior_precision @ offsets
        value = self._count * np.log(spread) + log_determinant + offsets @ pulls
        slopes = precision - np.outer(alpha, alpha) * (self._count / spread)
        gradient = np.array([np.vdot(slopes, kernel) for kernel in self._kernels])
        return 0.5 * float(value), 0.5 * gradient * np.exp(log_amplitudes) + pulls

    def noise(self, log_amplitudes: Matrix) -> float:
        """The scale σ² at these amplitudes: (yᵀA⁻¹y + ν σ²_0) / (n + ν)."""
        precision, _ = self._precision(log_amplitudes)
        return self._spread(precision @ self._residuals) / self._count

    def _spread(self, alpha: Matrix) -> float:
        return float(self._residuals @ alpha) + SCALE_WEIGHT * NOISE

    def _precision(self, log_amplitudes: Matrix) -> tuple[Matrix, float]:
        covariance = self._constant.copy()
        for amplitude, kernel in zip(np.exp(log_amplitudes), self._kernels, strict=True):
            covariance += amplitude * kernel
        factor, _ = lapack.dpotrf(covariance, lower=1, clean=1)
        lower, _ = lapack.dpotri(factor, lower=1)
        precision: NDArray[np.float64] = np.tril(lower) + np.tril(lower, -1).T
        return precision, 2.0 * float(np.log(np.diagonal(factor)).sum())
