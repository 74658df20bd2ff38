"""Baselines for single turns, where graders reward turns beside whole attempts.

A turn is a task of its own: what was known before its action is the conversation so far. Any
estimator then compares it with turns of other rollouts, and the turn's number is a context field,
so that turns at the same point inform each other most. Does not know how turn rewards are graded.

Invariants: turns of one rollout, and of one session, never serve each other: a later turn's
conversation holds the earlier turn's action, and their rewards may depend on both. A turn is scored
alone, from what may serve it: nothing of its own reward, action or later messages enters, not even
how many there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.baselines.features import Task, TaskFeatures, excluded_neighbours, task_features
from service.baselines.linear import Estimator, Scored

TURN = "turn"
MAX_NEIGHBOURS = 128
"""Turns that inform one: those at the nearest points. A Gaussian process over them takes milliseconds."""


def turn_features(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    context: Mapping[str, Any],
    *,
    turn: int,
) -> TaskFeatures:
    """Features of a turn from the messages before its action, which the caller cuts there."""
    return task_features(messages, tools, {**context, TURN: turn})


def features_before(document: Mapping[str, Any], turn: int) -> TaskFeatures:
    """Features of the turn that message `turn` of a normalised trace is."""
    messages: Sequence[Mapping[str, Any]] = document["messages"][:turn]
    return turn_features(messages, document.get("tools", ()), document.get("context", {}), turn=turn)


def text_digest(features: TaskFeatures) -> bytes:
    """SHA-256 of the text, by which its vector is cached."""
    return hashlib.sha256(features.text.encode()).digest()


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


def turn_baselines(estimator: Estimator, turns: Scored) -> NDArray[np.float64]:
    """[N], each turn's expected reward from the others that may serve it, given as its history.

    One prediction a turn: in one for all, the number of a rollout's later turns would move the bits of
    its earlier ones' sums. A turn that no other may serve gets `linear.PRIOR_REWARD` (0 from `zero`).
    """
    points = np.array([task.features.context[TURN] for task in turns.tasks], dtype=np.float64)
    values = np.zeros(len(points))
    for at, excluded in enumerate(excluded_neighbours(turns.tasks)):
        others = np.flatnonzero(~excluded)
        nearest = np.argsort(np.abs(points[others] - points[at]), kind="stable")[:MAX_NEIGHBOURS]
        served = others[np.sort(nearest)]
        past = Scored([turns.tasks[k] for k in served.tolist()], turns.rewards[served])
        values[at] = estimator.predict(Scored([turns.tasks[at]], np.zeros(1)), past).values[0]
    return values
