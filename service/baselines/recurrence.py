"""Estimators for tasks that recur: averages over earlier rollouts that share a key.

Do not look at what the tasks say. Invariants: those of `linear`; a task without relatives falls
back to the leave-one-out mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from service.baselines.features import Task, exclusions
from service.baselines.linear import Baselines, Scored, linear_baselines

TASK_KEY = "task_key"


def same_key(tasks: Sequence[Task], rows: int, field: str) -> NDArray[np.bool_]:
    """[rows, N], True where j may serve i and has its task key, or its value of a context field."""
    keys: list[Hashable] = [
        task.task_key if field == TASK_KEY else task.features.context.get(field) for task in tasks
    ]
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    codes[[key is None for key in keys]] = -1
    same = (codes[:rows, None] == codes[None, :]) & (codes[:rows, None] >= 0)
    return np.asarray(same & ~exclusions(tasks, rows))


@dataclass(frozen=True, slots=True)
class GroupMean:
    """b_i = mean reward of the other rollouts of the same task: GRPO's, for comparison.

    Deviations: rollout i itself is left out, as in RLOO; there is no division by the standard
    deviation; the group is whatever history holds, since a batch has one rollout a task.
    """

    name: ClassVar[str] = "group_mean"

    def predict(self, batch: Scored, history: Scored) -> Baselines:
        """Average the others of the same task."""
        same = same_key([*batch.tasks, *history.tasks], len(batch.tasks), TASK_KEY)
        return linear_baselines(self, batch, history, same.astype(np.float64), {})


@dataclass(frozen=True, slots=True)
class ExponentialAverage:
    """b_i = Σ_j (1−rate)^(k_j) r_j / Σ_j (1−rate)^(k_j), k_j = newer relatives than j in history.

    Relatives share the task key, or the value of the context field `field`. Source: prime-rl's RAE
    and SPO's tracker, which update b ← b + rate·(r − b) rollout by rollout. Deviations: written as
    weights, normalised (no start value to forget); other relatives of the batch count as newest.
    """

    rate: float = 0.1
    field: str = TASK_KEY
    name: ClassVar[str] = "ema"

    def predict(self, batch: Scored, history: Scored) -> Baselines:
        """Average the relatives, the newest weighing most."""
        size = len(batch.tasks)
        same = same_key([*batch.tasks, *history.tasks], size, self.field)
        past = same[:, size:]
        newer = past[:, ::-1].cumsum(axis=1)[:, ::-1] - past
        ranks = np.concatenate([np.zeros((size, size)), newer], axis=1)
        parameters: dict[str, float | int | str] = {"rate": self.rate, "field": self.field}
        return linear_baselines(self, batch, history, same * (1.0 - self.rate) ** ranks, parameters)
