"""Every estimator by its name, behind one protocol; the way in for the scheduler.

Knows which estimators there are and nothing of how they work. Invariants: those of `linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from service.baselines.gaussian_process import GaussianProcess
from service.baselines.linear import (
    PRIOR_REWARD,
    Baselines,
    Estimator,
    Scored,
    linear_baselines,
)
from service.baselines.recurrence import ExponentialAverage, GroupMean
from service.baselines.similarity import EmbeddingSoftmax, LengthBuckets, TfidfSoftmax

__all__ = [
    "ESTIMATORS",
    "PRIOR_REWARD",
    "Baselines",
    "Estimator",
    "Scored",
    "make_estimator",
]


@dataclass(frozen=True, slots=True)
class Zero:
    """b_i = 0: plain REINFORCE, for comparison."""

    name: ClassVar[str] = "zero"

    def predict(self, batch: Scored, history: Scored) -> Baselines:
        """Return zeros."""
        size = len(batch.tasks)
        weights = np.zeros((size, size + len(history.tasks)))
        return Baselines(np.zeros(size), weights, np.zeros(size), None, self.name, {})


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """b_i = Σ_{j≠i} r_j / (B−1), the batch mean of FlashREINFORCE without rollout i.

    Deviation: excluded neighbours are left out too. A row without neighbours falls back to history.
    """

    name: ClassVar[str] = "leave_one_out"

    def predict(self, batch: Scored, history: Scored) -> Baselines:
        """Average the others of the batch."""
        size = len(batch.tasks)
        return linear_baselines(self, batch, history, np.zeros((size, size + len(history.tasks))), {})


ESTIMATORS: Mapping[str, Callable[..., Estimator]] = {
    "zero": Zero,
    "leave_one_out": LeaveOneOut,
    "length_buckets": LengthBuckets,
    "tfidf_softmax": TfidfSoftmax,
    "embedding_softmax": EmbeddingSoftmax,
    "gaussian_process": GaussianProcess.from_parameters,
    "ema": ExponentialAverage,
    "group_mean": GroupMean,
}


def make_estimator(name: str, **parameters: float | int | str) -> Estimator:
    """Make an estimator by its name in settings; raises ValueError for a name that is not one."""
    if name not in ESTIMATORS:
        raise ValueError(f"no estimator {name!r}; there are {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name](**parameters)
