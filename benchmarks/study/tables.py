"""Reward tables of the study: real ones, generated mixes, and real ones whose rewards are shuffled.

Knows no estimator. Invariant: equal names give equal tables.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines import FLOORS, TableFloor
from service.baselines.calibration_sets import CalibrationSet, Encode, read_calibration_set

SEED = 7
SHORT = ("tau", "llama", "qwen", "inter", "labbench", "gsm8k", "automation", "smollm2")
BY_NAME: dict[str, TableFloor] = dict(zip(SHORT, FLOORS, strict=True))
MIXES = {"mix_u": ("inter", 0.4), "mix_flat": ("llama", 1.0)}
"""A mix: prompts of a real table, family means from Beta(a, a): U-shaped and flat."""
SHUFFLED = {
    "shuffled_smollm2": "smollm2",
    "shuffled_automation": "automation",
    "shuffled_labbench": "labbench",
}
"""The same prompts and rewards, not belonging together: the right answer is the mean."""
NAMES = (*SHORT, *MIXES, *SHUFFLED)


@dataclass(frozen=True, eq=False)
class Grouped:
    """A table, and the family that it states of each task by id; no estimator of the service reads it."""

    data: CalibrationSet
    family: Mapping[str, str]

    @cached_property
    def means(self) -> Mapping[str, float]:
        """The mean over a family's tasks of their mean reward, by task id."""
        of: dict[str, list[float]] = defaultdict(list)
        for task, rewards in zip(self.data.tasks, self.data.rewards, strict=True):
            of[self.family[task.task_key]].append(float(rewards.mean()))
        return {task.task_key: float(np.mean(of[self.family[task.task_key]])) for task in self.data.tasks}


def table(name: str, folder: Path, encode: Encode) -> Grouped:
    """Make the table of that name."""
    if name in MIXES:
        source, shape = MIXES[name]
        real = _real(source, folder, encode)
        return Grouped(_mix(real.data, real.family, shape), real.family)
    if name in SHUFFLED:
        real = _real(SHUFFLED[name], folder, encode)
        order = np.random.default_rng(SEED).permutation(len(real.data.tasks)).tolist()
        return Grouped(CalibrationSet(real.data.tasks, [real.data.rewards[k] for k in order]), real.family)
    return _real(name, folder, encode)


def _real(name: str, folder: Path, encode: Encode) -> Grouped:
    lines = (folder / f"{BY_NAME[name].file}.jsonl").read_text(encoding="utf-8").splitlines()
    data = read_calibration_set(lines, encode, minimum_rewards=BY_NAME[name].minimum_rewards)
    return Grouped(data, {entry["task_id"]: entry.get("group", "") for entry in map(json.loads, lines)})


def _mix(data: CalibrationSet, family: Mapping[str, str], shape: float) -> CalibrationSet:
    """Four coin flips a task; its mean: that of its family, less for longer prompts, and task noise."""
    rng = np.random.default_rng(SEED)
    means = {name: rng.beta(shape, shape) for name in sorted(set(family.values()))}
    lengths = np.log1p([task.features.prompt_length for task in data.tasks])
    longer = (lengths - lengths.mean()) / lengths.std()
    common = np.array([means[family[task.task_key]] for task in data.tasks])
    expected = np.clip(common - 0.08 * longer + rng.normal(0.0, 0.1, len(common)), 0.0, 1.0)
    rewards: list[NDArray[np.float64]] = [(rng.random(4) < mean).astype(np.float64) for mean in expected]
    return CalibrationSet(data.tasks, rewards)
