"""Turns as tasks: compared across rollouts, never within one."""

from __future__ import annotations

import numpy as np

from service.baselines.estimators import Scored, make_estimator
from service.baselines.features import excluded_neighbours
from service.baselines.turns import turn_features, turn_task
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
