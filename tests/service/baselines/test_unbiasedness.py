"""The policy gradient stays unbiased under every estimator, and the test can tell when it does not.

A softmax policy writes sequences of `a`, `b` and `stop`, at most three tokens, for eight tasks with
their own logits. All fifteen sequences are enumerated, so the gradient is known exactly. Tasks and
history are fixed; the weights then are too, and 200,000 batches of actions are drawn at once.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from service.baselines.estimators import ESTIMATORS, Baselines, make_estimator
from tests.service.baselines.synthetic_tasks import synthetic_mix

TASKS, BATCHES, STOP, LONGEST = 8, 200_000, 2, 3
BATCH, HISTORY = synthetic_mix(TASKS, seed=0), synthetic_mix(40, seed=1)
LOGITS = np.random.default_rng(2).normal(size=(TASKS, 3))


def all_sequences() -> list[tuple[int, ...]]:
    """Every sequence that ends with its first stop or with its third token."""
    ended = [(*start, STOP) for n in range(LONGEST) for start in itertools.product((0, 1), repeat=n)]
    return ended + list(itertools.product((0, 1), repeat=LONGEST))


SEQUENCES = all_sequences()
LENGTHS = np.array([len(sequence) for sequence in SEQUENCES])
COUNTS = np.array([[sequence.count(token) for token in range(3)] for sequence in SEQUENCES])
POLICY = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
PROBABILITIES = np.exp(np.log(POLICY) @ COUNTS.T)
"""[TASKS, sequences]"""
SCORES = COUNTS[None] - LENGTHS[None, :, None] * POLICY[:, None, :]
"""[TASKS, sequences, tokens]: ∇ ln π(sequence) by the task's logits."""
REWARDS = np.random.default_rng(3).random((TASKS, len(SEQUENCES))) * (LENGTHS == LONGEST)
EXACT = np.einsum("ts,ts,tsk->tk", PROBABILITIES, REWARDS, SCORES)


def deviation(weights: np.ndarray, constants: np.ndarray, divisor: np.ndarray) -> float:
    """Greatest |mean gradient − exact gradient| over tasks and tokens, in standard errors."""
    rng = np.random.default_rng(4)
    drawn = np.stack([rng.choice(len(SEQUENCES), BATCHES, p=p) for p in PROBABILITIES])
    rewards = np.take_along_axis(REWARDS, drawn, axis=1)
    past = constants + weights[:, TASKS:] @ HISTORY.rewards
    advantages = rewards - weights[:, :TASKS] @ rewards - past[:, None]
    greatest = 0.0
    for task in range(TASKS):
        scores = SCORES[task, drawn[task]] / divisor[drawn[task], None]
        gradients = advantages[task][:, None] * scores
        error = gradients.std(axis=0) / np.sqrt(BATCHES)
        greatest = max(greatest, float(np.abs((gradients.mean(axis=0) - EXACT[task]) / error).max()))
    return greatest


TOKEN_LEVEL = np.ones(len(SEQUENCES))
"""Divides by a constant that no rollout's own length enters."""


def predicted(name: str) -> Baselines:
    return make_estimator(name).predict(BATCH, HISTORY)


def test_the_probabilities_are_those_of_a_policy():
    np.testing.assert_allclose(PROBABILITIES.sum(axis=1), 1.0)
    np.testing.assert_allclose(np.einsum("ts,tsk->tk", PROBABILITIES, SCORES), 0.0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_mean_gradient_equals_the_exact_gradient(name):
    made = predicted(name)
    assert deviation(made.weights, made.constants, TOKEN_LEVEL) < 4.0


def test_a_kernel_that_includes_the_rollout_itself_is_caught():
    made = predicted("embedding_softmax")
    weights = 0.8 * made.weights
    weights[np.arange(TASKS), np.arange(TASKS)] = 0.2
    assert deviation(weights, made.constants, TOKEN_LEVEL) > 8.0


def test_dividing_by_a_rollouts_own_length_is_caught():
    """`sequence_mean`, scaled by the mean length so that only the dependence on length remains."""
    made = predicted("embedding_softmax")
    mean_length = float((PROBABILITIES @ LENGTHS).mean())
    assert deviation(made.weights, made.constants, LENGTHS / mean_length) > 8.0
