"""The post's calibration protocol: B_eff of every estimator from tasks with several rollouts.

Honest streams: a permutation of the tasks is cut into batches, one random rollout each, so that no
task recurs; each replay starts cold, and history, hyperparameters and choice come from its own
earlier batches. A baseline is compared with the mean of the task's unused rollouts, less the noise
of that mean. Source: "You Only Rollout Once", App. A and B; the windowed replay is *ours*. Reads no
files. Invariant: equal seeds give equal reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.baselines.calibration_sets import CalibrationSet
from service.baselines.effective_batch import (
    REFERENCE,
    Array,
    Interval,
    calibrated_ratio,
    calibrated_size,
    within_task_variance,
)
from service.baselines.estimators import Scored
from service.baselines.selection import AUTO, CANDIDATES, Selection, advanced, predictions

ESTIMATED = (*CANDIDATES, AUTO)
"""Every name that a replay gives baselines of."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedBatch:
    """One batch of one replay: which tasks, and what each estimator made of them."""

    number: int
    """Place in its replay; 0 has no history."""
    members: NDArray[np.intp]
    rewards: Array
    baselines: Mapping[str, Array]
    """[B] by estimator, `auto` among them."""


@dataclass(frozen=True, slots=True)
class Score:
    """What an estimator is worth on a calibration set."""

    mse: float
    size: Interval
    """B_eff."""
    ratio: Interval
    """B_eff over that of `leave_one_out`."""


def replayed(
    data: CalibrationSet,
    *,
    batch_size: int,
    window_batches: int,
    replays: int,
    seed: int,
    on_batch: Callable[[], None] = lambda: None,
) -> Iterator[ReplayedBatch]:
    """Replay honest streams; `on_batch` is called after each batch (a progress bar)."""
    rng = np.random.default_rng(seed)
    for _ in range(replays):
        order = rng.permutation(len(data.tasks))
        rewards = np.array([rng.choice(task_rewards) for task_rewards in data.rewards])
        state = Selection()
        for number in range(len(order) // batch_size):
            start = number * batch_size
            members = order[start : start + batch_size]
            batch = _scored(data, rewards, members)
            earlier = order[max(0, start - window_batches * batch_size) : start]
            history = _scored(data, rewards, earlier)
            made = predictions(state, batch, history)
            values = {name: baselines.values for name, baselines in made.items()}
            yield ReplayedBatch(number, members, batch.rewards, {**values, AUTO: values[state.chosen]})
            state = advanced(state, made, batch, history)
            on_batch()


def _scored(data: CalibrationSet, rewards: Array, members: NDArray[np.intp]) -> Scored:
    return Scored([data.tasks[k] for k in members.tolist()], rewards[members])


def task_errors(data: CalibrationSet, batches: Sequence[ReplayedBatch], name: str) -> Array:
    """[N] mean over replays of (b − mean of unused rollouts)² − σ²_i / (G_i − 1); NaN if unseen."""
    counts = np.array([len(task_rewards) for task_rewards in data.rewards])
    totals = np.array([task_rewards.sum() for task_rewards in data.rewards])
    noise = within_task_variance(data.rewards) / (counts - 1)
    errors, seen = np.zeros(len(counts)), np.zeros(len(counts))
    for batch in batches:
        i = batch.members
        unused = (totals[i] - batch.rewards) / (counts[i] - 1)
        errors[i] += (batch.baselines[name] - unused) ** 2 - noise[i]
        seen[i] += 1
    return np.where(seen > 0, errors / np.maximum(seen, 1), np.nan)


def scores(
    data: CalibrationSet, batches: Sequence[ReplayedBatch], *, batch_size: int, seed: int
) -> dict[str, Score]:
    """Every estimator's score over the given batches, with intervals over tasks."""
    errors = {name: task_errors(data, batches, name) for name in batches[0].baselines}
    seen = np.isfinite(errors[REFERENCE])
    within = within_task_variance(data.rewards)[seen]
    errors = {name: values[seen] for name, values in errors.items()}
    return {
        name: Score(
            mse=float(values.mean()),
            size=calibrated_size(batch_size, within, values, seed=seed),
            ratio=calibrated_ratio(within, values, errors[REFERENCE], seed=seed),
        )
        for name, values in errors.items()
    }
