"""Calibration sets: tasks with several rewards each, as JSON lines and as what estimators read.

    {"task_id": "t1", "prompt": "…", "rewards": [0, 1, 1], "system": "…", "context": {"tier": 2}}

`system` and `context` may be absent; a reward may be null, which is missing, not zero. Opens no
files. Invariant: only what was known before the first action becomes a feature; other fields of a
line are ignored.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.baselines.features import Task, TaskFeatures, task_features

Encode = Callable[[Sequence[str]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationSet:
    """Tasks and the rewards of two or more rollouts of each, all of one policy."""

    tasks: Sequence[Task]
    rewards: Sequence[NDArray[np.float64]]

    def __post_init__(self) -> None:
        if any(len(task_rewards) < 2 for task_rewards in self.rewards):
            raise ValueError("every task needs at least two rewards")


def read_calibration_set(lines: Iterable[str], encode: Encode, *, minimum_rewards: int = 2) -> CalibrationSet:
    """Parse JSON lines; tasks with fewer rewards are left out, a malformed line is a ValueError."""
    parsed = [parsed_line(line, n) for n, line in enumerate(lines, 1) if line.strip()]
    kept = [entry for entry in parsed if len(entry[2]) >= max(2, minimum_rewards)]
    if not kept:
        raise ValueError(f"none of {len(parsed)} tasks has {max(2, minimum_rewards)} rewards")
    vectors = encode([features.text for _, features, _ in kept])
    tasks = [
        calibration_task(task_id, features, vector)
        for (task_id, features, _), vector in zip(kept, vectors, strict=True)
    ]
    return CalibrationSet(tasks, [rewards for _, _, rewards in kept])


def parsed_line(line: str, number: int) -> tuple[str, TaskFeatures, NDArray[np.float64]]:
    """Task id, features and rewards of one line."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}: not JSON: {error}") from error
    for name, kind in (("task_id", str), ("prompt", str), ("rewards", list)):
        if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
            raise ValueError(f"line {number}: `{name}` must be a {kind.__name__}")  # noqa: TRY004
    messages = [{"role": "user", "content": entry["prompt"]}]
    if entry.get("system"):
        messages.insert(0, {"role": "system", "content": str(entry["system"])})
    features = task_features(messages, [], entry.get("context") or {})
    return entry["task_id"], features, _rewards(entry["rewards"], number)


def _rewards(values: list[Any], number: int) -> NDArray[np.float64]:
    rewards = [value for value in values if value is not None]
    for value in rewards:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"line {number}: `rewards` holds {value!r}, which is not a number")
    return np.array(rewards, dtype=np.float64)


def calibration_task(task_id: str, features: TaskFeatures, vector: NDArray[np.float32]) -> Task:
    """A task that shares no session or conversation with another."""
    identity = task_id.encode()
    return Task(features, vector, task_id, None, identity, identity, frozenset(), 0)


def calibration_lines(
    rollouts: Iterable[tuple[str, Mapping[str, Any], float]], *, minimum_rewards: int = 2
) -> Iterator[str]:
    """Export logged rollouts of tasks that recur: (task key, prompt fields, reward) each.

    The prompt fields (`prompt`, `system`, `context`) are those of a task's first rollout. The caller
    passes rollouts of one policy version, or of few: B_eff speaks of one policy.
    """
    prompts: dict[str, Mapping[str, Any]] = {}
    rewards: dict[str, list[float]] = defaultdict(list)
    for key, prompt, reward in rollouts:
        prompts.setdefault(key, prompt)
        rewards[key].append(reward)
    for key, prompt in prompts.items():
        if len(rewards[key]) >= minimum_rewards:
            line = {"task_id": key, **prompt, "rewards": rewards[key]}
            yield json.dumps(line, ensure_ascii=False)
