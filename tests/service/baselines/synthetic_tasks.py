"""Synthetic tasks and rewards, imported by name from beside the tests of baselines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from service.baselines.estimators import Scored
from service.baselines.features import Task, task_features


def pseudo_embedding(text: str) -> NDArray[np.float32]:
    """A unit vector that similar texts share in part: hashed words, as an encoder's stand-in."""
    vector = np.full(32, 1e-3)
    for word in text.split():
        vector += np.random.default_rng(list(hashlib.sha256(word.encode()).digest())).normal(size=32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def synthetic_task(
    prompt: str,
    identity: str,
    *,
    session_id: str | None = None,
    contains: Sequence[str] = (),
    depth: int = 0,
    context: dict[str, object] | None = None,
) -> Task:
    """A task with hashes made of `identity`, whose prompt contains the identities in `contains`."""
    features = task_features([{"role": "user", "content": prompt}], [], context or {})
    return Task(
        features=features,
        embedding=pseudo_embedding(features.text),
        task_key=prompt,
        session_id=session_id,
        content_hash=identity.encode(),
        opening_hash=b"opening " + identity.encode(),
        prompt_hashes=frozenset(b"opening " + other.encode() for other in contains),
        depth=depth,
    )


FAMILIES = {"add small numbers": 0.9, "translate this poem": 0.5, "prove the conjecture": 0.1}


def synthetic_mix(size: int, seed: int, prefix: str = "") -> Scored:
    """Binary rewards of tasks from three families whose difficulty their words give away."""
    rng = np.random.default_rng(seed)
    families = rng.choice(list(FAMILIES), size)
    prompts = [f"{family} {'x' * int(rng.integers(1, 40))}" for family in families]
    tasks = [synthetic_task(p, f"{prefix}{seed}/{k}") for k, p in enumerate(prompts)]
    rewards = rng.random(size) < np.array([FAMILIES[str(family)] for family in families])
    return Scored(tasks, rewards.astype(np.float64))


EMPTY = Scored([], np.zeros(0))
