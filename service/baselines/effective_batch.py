"""How good a baseline is: effective batch size and ratios of it, with bootstrap intervals.

    B_eff = B · σ²_ε / (σ²_ε + MSE(b))          ("You Only Rollout Once", App. A)

Takes arrays of errors and knows nothing of estimators, tasks or where the errors come from.
Invariants: equal seeds give equal intervals; compared quantities are resampled together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RESAMPLES = 2_000
REFERENCE = "leave_one_out"
"""The estimator that ratios are taken to."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % bootstrap interval. Example: `Interval(1.41, 1.36, 1.47)`."""

    value: float
    low: float
    high: float


def effective_batch_size(batch_size: float, within: float, mse: float) -> float:
    """B_eff = B · σ²_ε / (σ²_ε + MSE(b)); zero where rewards have no noise to compare with."""
    return batch_size * within / (within + mse) if within > 0.0 else 0.0


def within_task_variance(rewards: Sequence[Array]) -> Array:
    """Unbiased variance of each task's rewards; their mean estimates σ²_ε."""
    return np.array([np.var(task_rewards, ddof=1) for task_rewards in rewards])


def between_task_variance(rewards: Sequence[Array]) -> float:
    """σ²_μ: variance of task means less what their sampling noise adds, mean of s²_i / G_i."""
    means = np.array([task_rewards.mean() for task_rewards in rewards])
    counts = np.array([len(task_rewards) for task_rewards in rewards])
    return float(means.var(ddof=1) - (within_task_variance(rewards) / counts).mean())


def calibrated_size(batch_size: int, within: Array, errors: Array, *, seed: int) -> Interval:
    """B_eff from per-task variances and per-task mean squared errors, resampling tasks."""

    def size(picked: NDArray[np.intp]) -> float:
        return effective_batch_size(batch_size, within[picked].mean(), errors[picked].mean())

    return bootstrap(size, len(within), block=1, seed=seed)


def calibrated_ratio(within: Array, errors: Array, reference: Array, *, seed: int) -> Interval:
    """B_eff(b) / B_eff(m) = (σ²_ε + MSE(m)) / (σ²_ε + MSE(b)), resampling tasks in pairs."""

    def ratio(picked: NDArray[np.intp]) -> float:
        noise = within[picked].mean()
        return float((noise + reference[picked].mean()) / (noise + errors[picked].mean()))

    return bootstrap(ratio, len(within), block=1, seed=seed)


def prequential_ratio(squared_advantages: Array, reference: Array, *, block: int = 4, seed: int) -> Interval:
    """B_eff(b) / B_eff(m) = Σ(r−m)² / Σ(r−b)² from single rollouts, one sum a batch (*ours*).

    σ²_ε is common to both and needs no repeated rollouts. Successive batches share history, so
    blocks of batches are resampled, with wrap-around (circular block bootstrap, Politis and Romano
    1992).
    """

    def ratio(picked: NDArray[np.intp]) -> float:
        wasted = squared_advantages[picked].sum()
        return float(reference[picked].sum() / wasted) if wasted > 0.0 else 1.0

    return bootstrap(ratio, len(reference), block=block, seed=seed)


def bootstrap(
    statistic: Callable[[NDArray[np.intp]], float], count: int, *, block: int, seed: int
) -> Interval:
    """Percentile interval of a statistic of resampled positions 0..count-1."""
    rng = np.random.default_rng(seed)
    length = max(1, min(block, count))
    starts = rng.integers(count, size=(RESAMPLES, -(-count // length)))
    positions = (starts[:, :, None] + np.arange(length)) % count
    draws = [statistic(picked.ravel()[:count]) for picked in positions]
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(statistic(np.arange(count)), float(low), float(high))
