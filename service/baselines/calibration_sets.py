"""Calibration sets: tasks with several rewards each, as JSON lines and as what estimators read.

    {"task_id": "t1", "prompt": "…", "rewards": [0, 1, 1], "system": "…", "context": {"tier": 2}}

`system`, `context` and `tools` may be absent; a reward may be null, which is missing, not zero. Where the
prompt was more than one message, `messages` says which, and `system` and `prompt` are for people. Opens no
files. Invariants: only what was known before the first action becomes a feature; other fields of a
line are ignored; what `calibration_line` writes, `parsed_lines` reads back as the same features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.baselines.features import SYSTEM_ROLES, Task, TaskFeatures, message_text, task_features

Encode = Callable[[Sequence[str]], NDArray[np.float32]]

REQUIRED = {"task_id": str, "prompt": str, "rewards": list}
OPTIONAL = {"system": str, "context": dict, "tools": list, "messages": list}
OBJECTS = ("tools", "messages")
"""Lists of objects."""
JSON_NAMES = {str: "a string", list: "a list", dict: "an object"}


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
    entries = parsed_lines(lines)
    kept = [entry for entry in entries if len(entry[2]) >= max(2, minimum_rewards)]
    if not kept:
        raise ValueError(f"none of {len(entries)} tasks has {max(2, minimum_rewards)} rewards")
    vectors = encode([features.text for _, features, _ in kept])
    tasks = [
        calibration_task(task_id, features, vector)
        for (task_id, features, _), vector in zip(kept, vectors, strict=True)
    ]
    return CalibrationSet(tasks, [rewards for _, _, rewards in kept])


def parsed_lines(lines: Iterable[str]) -> list[tuple[str, TaskFeatures, NDArray[np.float64]]]:
    """Task id, features and rewards of each line; raises as `checked_lines` does."""
    return [
        (entry["task_id"], line_features(entry), np.array(entry["rewards"], dtype=np.float64))
        for entry in checked_lines(lines)
    ]


def line_features(entry: Mapping[str, Any]) -> TaskFeatures:
    """The features of the task that a checked line states."""
    return task_features(prompt_messages(entry), entry.get("tools") or [], entry.get("context") or {})


def checked_lines(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The fields of each line that is not blank, missing rewards left out.

    A ValueError names the line and the field. A task has one line: on two it would be its own neighbour.
    """
    entries, first = [], dict[str, int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _checked(line, number)
        task_id = entry["task_id"]
        if first.setdefault(task_id, number) != number:
            raise ValueError(f"line {number}: `task_id` {task_id!r} is on line {first[task_id]} already")
        entries.append(entry)
    return entries


def _checked(line: str, number: int) -> dict[str, Any]:
    entry = _parsed(line, number)
    for name, kind in (REQUIRED | OPTIONAL).items():
        if not isinstance(entry.get(name), kind) and (name in REQUIRED or entry.get(name) is not None):
            raise ValueError(f"line {number}: `{name}` must be {JSON_NAMES[kind]}")
    for name in OBJECTS:
        if not all(isinstance(item, dict) for item in entry.get(name) or ()):
            raise ValueError(f"line {number}: `{name}` must be a list of objects")
    return entry | {"rewards": _rewards(entry["rewards"], number)}


def _parsed(line: str, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        # NaN, infinity and lone surrogates are no JSON, whatever Python reads
        json.dumps(entry, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"line {number}: must be an object")  # noqa: TRY004 - every defect is a ValueError
    return entry


def prompt_messages(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation before the first action, as a line states it."""
    if entry.get("messages"):
        return list(entry["messages"])
    system = [{"role": "system", "content": entry["system"]}] if entry.get("system") else []
    return [*system, {"role": "user", "content": entry["prompt"]}]


def _rewards(values: list[Any], number: int) -> list[float]:
    rewards = [value for value in values if value is not None]
    for value in rewards:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"line {number}: `rewards` holds {value!r}, which is not a number from 0 to 1")
    return rewards


def calibration_task(task_id: str, features: TaskFeatures, vector: NDArray[np.float32]) -> Task:
    """A task that shares no session or conversation with another."""
    identity = task_id.encode()
    return Task(features, vector, task_id, None, identity, identity, frozenset(), 0)


def calibration_line(
    task_id: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    context: Mapping[str, Any],
    rewards: Sequence[float],
) -> str:
    """Write one task from what was known before its first action, and the rewards of its rollouts."""
    said = [{"role": message.get("role"), "content": message_text(message)} for message in messages]
    spoken: dict[str, list[Any]] = {"system": [], "prompt": []}
    for message in said:
        spoken["system" if message["role"] in SYSTEM_ROLES else "prompt"].append(message["content"])
    line: dict[str, Any] = {
        "task_id": task_id, "prompt": "\n".join(spoken["prompt"]), "rewards": list(rewards),
        "system": "\n".join(spoken["system"]), "context": context, "tools": tools,
    }  # fmt: skip
    if prompt_messages(line) != said:
        line["messages"] = said
    return json.dumps({name: value for name, value in line.items() if value or name in REQUIRED})
