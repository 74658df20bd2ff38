"""Turns as tasks: compared across rollouts, never within one; the gradient stays unbiased."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from service.baselines import turns
from service.baselines.estimators import ESTIMATORS, Scored, make_estimator
from service.baselines.features import excluded_neighbours
from service.baselines.linear import PRIOR_REWARD
from service.baselines.turns import features_before, turn_baselines, turn_features, turn_task
from tests.service.baselines.synthetic_tasks import EMPTY, pseudo_embedding, synthetic_task


def turns_of(identity: str, count: int):
    rollout = synthetic_task("book a flight", identity)
    for turn in range(count):
        messages = [{"role": "user", "content": f"step {k}"} for k in range(turn + 1)]
        features = turn_features(messages, [], {}, turn=turn)
        yield turn_task(rollout, features, pseudo_embedding(features.text), turn=turn)


def test_turns_of_one_rollout_never_serve_each_other():
    tasks = [*turns_of("a", 3), *turns_of("b", 2)]
    expected = np.kron(np.eye(2), np.ones((3, 3)))[:5, :5].astype(bool)
    np.testing.assert_array_equal(excluded_neighbours(tasks), expected)


def test_turns_at_the_same_point_inform_each_other_most():
    tasks = [turn for name in "abcd" for turn in turns_of(name, 3)]
    made = make_estimator("gaussian_process").predict(Scored(tasks, np.zeros(12)), EMPTY)
    point = np.array([task.features.context["turn"] for task in tasks])
    same = made.weights[:, :12][point[:, None] == point[None, :]].sum()
    assert same > 0.5 * made.weights.sum()


def test_a_turn_without_others_is_expected_to_earn_the_prior():
    tasks = list(turns_of("a", 3))
    values = turn_baselines(make_estimator("gaussian_process"), Scored(tasks, np.ones(3)))
    assert values.tolist() == [PRIOR_REWARD] * 3


def test_only_the_nearest_points_inform_a_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "MAX_NEIGHBOURS", 2)
    tasks = [turn for name in "abc" for turn in turns_of(name, 3)]
    rewards = np.array([0.0, 0.0, 0.0, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7])
    values = turn_baselines(make_estimator("leave_one_out"), Scored(tasks, rewards))
    np.testing.assert_allclose(values[:3], [0.3, 0.4, 0.5])


USER = {"role": "user", "content": "go"}

# Three agents, two turns each of one of two actions: all 64 outcomes are enumerated, so that the mean
# gradient is exact. What a second turn's features say depends on the other agents' first actions.
AGENTS, WORDS = 3, ("yes", "no")
FIRST = np.array([0.3, 0.6, 0.8])
"""[agent], probability of action 1 in the first turn."""
SECOND = np.array([[0.2, 0.7], [0.5, 0.4], [0.9, 0.3]])
"""[agent, first action], of action 1 in the second."""
REWARDS = np.random.default_rng(0).random((AGENTS, 2, 2, 2))
"""[agent, turn, first action, second action]; a first turn's reward, too, may depend on what follows."""


def gradient(baselines: Callable[[Scored], np.ndarray]) -> np.ndarray:
    """[agent, 3], exact mean of Σ_t (r_t − b_t) ∇ log π(a_t), by the logits of both turns' states."""
    total = np.zeros((AGENTS, 3))
    for actions in itertools.product(itertools.product((0, 1), repeat=2), repeat=AGENTS):
        scored = graded(actions)
        advantages = (scored.rewards - baselines(scored)).reshape(AGENTS, 2)
        chance = 1.0
        scores = np.zeros((AGENTS, 2, 3))
        for agent, (first, second) in enumerate(actions):
            p, q = FIRST[agent], SECOND[agent, first]
            chance *= (p if first else 1 - p) * (q if second else 1 - q)
            scores[agent, 0, 0], scores[agent, 1, 1 + first] = first - p, second - q
        total += chance * np.einsum("at,atk->ak", advantages, scores)
    return total


def graded(actions: tuple[tuple[int, int], ...]) -> Scored:
    tasks = []
    for agent, (first, second) in enumerate(actions):
        said = [{"role": "assistant", "content": WORDS[action]} for action in (first, second)]
        document = {"messages": [{"role": "user", "content": f"task {agent}"}, said[0], USER, said[1]]}
        for turn in (1, 3):
            features = features_before(document, turn)
            rollout = synthetic_task(f"task {agent}", f"{agent}{first}{second}")
            tasks.append(turn_task(rollout, features, pseudo_embedding(features.text), turn=turn))
    rewards = [REWARDS[agent, turn, *pair] for agent, pair in enumerate(actions) for turn in (0, 1)]
    return Scored(tasks, np.array(rewards))


PLAIN = gradient(lambda scored: np.zeros(len(scored.rewards)))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_mean_gradient_is_that_without_baselines(name):
    estimator = make_estimator(name)
    np.testing.assert_allclose(gradient(lambda scored: turn_baselines(estimator, scored)), PLAIN, atol=1e-12)


def test_a_baseline_that_sees_the_later_turn_of_its_rollout_is_caught():
    def seeing(scored: Scored) -> np.ndarray:
        return (scored.rewards.sum() - scored.rewards) / (len(scored.rewards) - 1)

    assert np.abs(gradient(seeing) - PLAIN).max() > 1e-3
