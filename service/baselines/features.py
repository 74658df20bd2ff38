"""What a baseline may know of a rollout, and which rollouts may inform which.

Holds only facts settled before the rollout's first action: no type here has a field for a response
or a reward. Does not know where rollouts are stored or how texts become vectors.

Invariants: equal inputs give equal features; `excluded_neighbours` is True on its diagonal.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

ContextValue = str | float | bool

PROMPT_CHARACTERS = 8_000
SYSTEM_CHARACTERS = 4_000
TOOLS_CHARACTERS = 4_000
CONTEXT_CHARACTERS = 4_000
"""Most characters of each part that enter `TaskFeatures.text`; see `abridged`."""
FIELD_CHARACTERS = 200
"""Most characters of a context field's name and of its value."""
FIELDS = 256
"""Most context fields that are kept, the first ones by name."""

SYSTEM_ROLES = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class TaskFeatures:
    """A task as it was known before the first action.

    Example: `TaskFeatures("refund order 7\\n\\ncustomer=acme", 14, {"customer": "acme"})`
    """

    text: str
    """Prompt, context, system prompt and tools, the most task-specific first."""
    prompt_length: int
    """Characters of the prompt messages, before any abridging."""
    context: Mapping[str, ContextValue]
    """Flat fields that the agent's owner sent as known before the start."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One rollout as a baseline may see it; its reward is kept apart, in `estimators.Scored`."""

    features: TaskFeatures
    embedding: NDArray[np.float32]
    """Unit norm."""
    task_key: str
    session_id: str | None
    content_hash: bytes
    """Equal for re-deliveries of one attempt under another id."""
    opening_hash: bytes
    """Hash of its conversation through its first action."""
    prompt_hashes: frozenset[bytes]
    """Hashes of every conversation that its prompt contains."""
    depth: int
    """Depth of the policy version that sampled it."""


def first_action(document: Mapping[str, Any]) -> int:
    """Return the index of the first message that the policy produced; len(messages) if none."""
    messages: Sequence[Mapping[str, Any]] = document["messages"]
    called = [call["message_index"] for call in document.get("calls", ())]
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return min(called) if called else (spoken[0] if spoken else len(messages))


def task_features(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    context: Mapping[str, Any],
) -> TaskFeatures:
    """Make the features of a task from the messages before its first action.

    The caller cuts the messages: whatever is passed here is taken as known before the start.
    """
    system = [message_text(m) for m in messages if m.get("role") in SYSTEM_ROLES]
    prompt = [message_text(m) for m in messages if m.get("role") not in SYSTEM_ROLES]
    flat = flat_context(context)
    parts = (
        abridged("\n".join(prompt), PROMPT_CHARACTERS),
        abridged("\n".join(f"{name}={value}" for name, value in flat.items()), CONTEXT_CHARACTERS),
        abridged("\n".join(system), SYSTEM_CHARACTERS),
        abridged("\n".join(tool_text(tool) for tool in tools), TOOLS_CHARACTERS),
    )
    text = "\n\n".join(part for part in parts if part)
    return TaskFeatures(text, sum(len(part) for part in prompt), flat)


def abridged(text: str, limit: int) -> str:
    """Keep the head and the tail of a long text, `limit` characters in all.

    A question stands as often after a pasted document as before it, so both ends stay.
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n{text[-half:]}"


def message_text(message: Mapping[str, Any]) -> str:
    """The words of one message, whether its content is a string, a list of parts or nothing."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(filter(None, map(part_text, content)))
    return part_text(content)


def part_text(part: Any) -> str:
    """The words of one content part; an image or audio part is represented by its type alone."""
    if isinstance(part, Mapping):
        for name in ("text", "content", "input_text"):
            if isinstance(part.get(name), str):
                return str(part[name])
        return f"[{part.get('type', 'part')}]"
    return str(part)


def tool_text(tool: Mapping[str, Any]) -> str:
    """A tool's name and description, in the flat or the nested (`function`) spelling."""
    nested = tool.get("function")
    described = nested if isinstance(nested, Mapping) else tool
    return f"{described.get('name') or ''}: {described.get('description') or ''}"


def flat_context(context: Mapping[str, Any]) -> dict[str, ContextValue]:
    """Flatten nested fields to dotted names, sorted; lists and odd values become canonical text.

    Bounded: features are stored with every rollout and read again for every batch.
    """
    return {
        abridged(name, FIELD_CHARACTERS): abridged(value, FIELD_CHARACTERS)
        if isinstance(value, str)
        else value
        for name, value in islice(sorted(_leaves(context, ""), key=itemgetter(0)), FIELDS)
    }


def _leaves(value: Any, name: str) -> Iterable[tuple[str, ContextValue]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, str | bool):
        yield name, value
    elif isinstance(value, int | float) and _is_finite(value):
        yield name, float(value)
    elif value is not None:
        yield name, json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer beyond the range of a float
        return False


def excluded_neighbours(tasks: Sequence[Task]) -> NDArray[np.bool_]:
    """[N, N], True where task j may not serve task i.

    That is: j is i; j re-delivers i's attempt; j shares i's session; or j's prompt contains i's
    conversation, so that j's features and reward depend on i's actions.
    """
    return exclusions(tasks, len(tasks))


def exclusions(tasks: Sequence[Task], rows: int) -> NDArray[np.bool_]:
    """The first `rows` rows of `excluded_neighbours`: a batch needs no row for its history."""
    excluded = np.zeros((rows, len(tasks)), dtype=np.bool_)
    np.fill_diagonal(excluded, True)
    same_attempt, same_session, containing = _columns(tasks)
    for i, task in enumerate(tasks[:rows]):
        excluded[i, same_attempt[task.content_hash]] = True
        excluded[i, containing.get(task.opening_hash, [])] = True
        if task.session_id is not None:
            excluded[i, same_session[task.session_id]] = True
    return excluded


Columns = dict[bytes, list[int]]


def _columns(tasks: Sequence[Task]) -> tuple[Columns, dict[str, list[int]], Columns]:
    same_attempt: Columns = defaultdict(list)
    same_session: dict[str, list[int]] = defaultdict(list)
    containing: Columns = defaultdict(list)
    for j, task in enumerate(tasks):
        same_attempt[task.content_hash].append(j)
        if task.session_id is not None:
            same_session[task.session_id].append(j)
        for conversation in task.prompt_hashes:
            containing[conversation].append(j)
    return same_attempt, same_session, containing
