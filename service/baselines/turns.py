"""Baselines for single turns, where graders reward turns rather than whole attempts.

A turn is a task of its own: what was known before its action is the conversation so far. Any
estimator then compares it with turns of other rollouts, and the turn's number is a context field,
so that turns at the same point inform each other most. Does not know how turn rewards are graded.

Invariant: turns of one rollout, and of one session, never serve each other: a later turn's
conversation holds the earlier turn's action, and their rewards may depend on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.baselines.features import Task, TaskFeatures, task_features

TURN = "turn"


def turn_features(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    context: Mapping[str, Any],
    *,
    turn: int,
) -> TaskFeatures:
    """Features of a turn from the messages before its action, which the caller cuts there."""
    return task_features(messages, tools, {**context, TURN: turn})


def turn_task(rollout: Task, features: TaskFeatures, embedding: NDArray[np.float32], *, turn: int) -> Task:
    """One turn of a rollout as a baseline may see it; a rollout without session becomes its own."""
    return replace(
        rollout,
        features=features,
        embedding=embedding,
        task_key=f"{rollout.task_key}#{turn}",
        session_id=rollout.session_id or rollout.content_hash.hex(),
        content_hash=rollout.content_hash + turn.to_bytes(4, "big"),
    )
