"""Rules of every estimator: never itself, never NaN, always within the range of rewards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.baselines.estimators import ESTIMATORS, PRIOR_REWARD, Scored, make_estimator
from tests.service.baselines.synthetic_tasks import EMPTY, synthetic_mix, synthetic_task

EVERY = pytest.mark.parametrize("name", sorted(ESTIMATORS))
PROMPTS = [
    "add 1 and 2",
    "add 17 and 25",
    "写一首关于春天的诗",
    "",
    "prove it " * 40,
    "Übung macht",
]
REWARDS = st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(0, 1))


@st.composite
def scored(draw: st.DrawFn, smallest: int, largest: int, prefix: str) -> Scored:
    """Rollouts with equal prompts, shared sessions, re-deliveries and contained conversations."""
    size = draw(st.integers(smallest, largest))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    crowd = int(rng.choice([2, 10, 1_000]))
    tasks = [
        synthetic_task(
            str(rng.choice(PROMPTS)),
            str(rng.integers(crowd)) if rng.random() < 0.2 else f"{prefix}{k}",
            session_id=str(rng.integers(crowd)) if rng.random() < 0.3 else None,
            contains=[f"batch {rng.integers(40)}"] if rng.random() < 0.2 else [],
            depth=int(rng.integers(20)),
            context={"customer": str(rng.integers(3))} if rng.random() < 0.5 else {},
        )
        for k in range(size)
    ]
    rewards = rng.random(size).round(int(rng.integers(3)))
    return Scored(tasks, np.ones(size) if rng.random() < 0.2 else rewards)


@EVERY
@settings(max_examples=12, deadline=None)
@given(batch=scored(1, 40, "batch "), history=scored(0, 60, "history "), data=st.data())
def test_changing_a_reward_leaves_its_own_baseline_bit_identical(name, batch, history, data):
    estimator = make_estimator(name)
    before = estimator.predict(batch, history)
    i = data.draw(st.integers(0, len(batch.tasks) - 1))
    rewards = batch.rewards.copy()
    rewards[i] = data.draw(REWARDS)
    after = estimator.predict(Scored(batch.tasks, rewards), history)
    assert before.values[i].tobytes() == after.values[i].tobytes()
    np.testing.assert_array_equal(before.weights, after.weights)
    assert np.isfinite(before.values).all()
    assert (np.diagonal(before.weights) == 0).all()


@EVERY
@settings(max_examples=12, deadline=None)
@given(batch=scored(2, 20, "batch "), history=scored(0, 40, "history "), data=st.data())
def test_changing_an_excluded_neighbour_leaves_the_baseline_bit_identical(name, batch, history, data):
    """Prompt, embedding, context, depth and reward may all depend on the actions of rollout i."""
    estimator = make_estimator(name)
    i = data.draw(st.integers(0, len(batch.tasks) - 1))
    mates = {"session_id": "together"}
    me = synthetic_task(PROMPTS[0], "me", **mates)
    batch_tasks, history_tasks = list(batch.tasks), list(history.tasks)
    batch_tasks[i] = me
    j = data.draw(st.integers(0, len(batch_tasks) + len(history_tasks) - 1).filter(lambda j: j != i))
    values = []
    for prompt, depth, reward in (("add 1 and 2", 0, 0.0), ("a b c d e", 9, 1.0)):
        mate = synthetic_task(prompt, "mate", depth=depth, context={"k": prompt}, **mates)
        tasks = [*batch_tasks, *history_tasks]
        rewards = np.concatenate([batch.rewards, history.rewards])
        tasks[j], rewards[j] = mate, reward
        size = len(batch_tasks)
        changed = Scored(tasks[:size], rewards[:size]), Scored(tasks[size:], rewards[size:])
        values.append(estimator.predict(*changed).values[i])
    assert values[0].tobytes() == values[1].tobytes()


@EVERY
def test_a_lone_rollout_without_history_gets_the_stated_prior(name):
    lone = synthetic_mix(1, seed=0)
    expected = 0.0 if name == "zero" else PRIOR_REWARD
    np.testing.assert_allclose(make_estimator(name).predict(lone, EMPTY).values, expected)


@EVERY
def test_constant_rewards_give_that_constant(name):
    batch, history = synthetic_mix(32, seed=1), synthetic_mix(64, seed=2)
    for constant in (0.0, 1.0):
        values = (
            make_estimator(name)
            .predict(
                Scored(batch.tasks, np.full(32, constant)),
                Scored(history.tasks, np.full(64, constant)),
            )
            .values
        )
        expected = 0.0 if name == "zero" else constant
        np.testing.assert_allclose(values, expected, atol=0.03)


@EVERY
def test_values_are_the_weights_times_the_rewards(name):
    batch, history = synthetic_mix(16, seed=3), synthetic_mix(40, seed=4)
    made = make_estimator(name).predict(batch, history)
    rewards = np.concatenate([batch.rewards, history.rewards])
    np.testing.assert_allclose(made.values, made.weights @ rewards + made.constants, atol=1e-12)
    assert made.estimator == name


@EVERY
def test_prompts_of_any_language_and_100000_characters_are_handled(name):
    prompts = ["x" * 100_000, "日本語 " * 20_000, "\x00\ud7ff", "🙂" * 1_000, "अनुवाद", ""]
    batch = Scored([synthetic_task(p, f"{k}") for k, p in enumerate(prompts)], np.linspace(0, 1, 6))
    values = make_estimator(name).predict(batch, EMPTY).values
    assert np.isfinite(values).all()


def test_leave_one_out_is_the_mean_of_the_others():
    batch = synthetic_mix(5, seed=5)
    expected = [np.delete(batch.rewards, i).mean() for i in range(5)]
    np.testing.assert_allclose(make_estimator("leave_one_out").predict(batch, EMPTY).values, expected)


@pytest.mark.parametrize("name", ["embedding_softmax", "tfidf_softmax"])
def test_softmax_weights_follow_the_formula(name):
    batch = synthetic_mix(8, seed=6)
    weights = make_estimator(name, temperature=0.2).predict(batch, EMPTY).weights
    sharper = make_estimator(name, temperature=0.1).predict(batch, EMPTY).weights
    np.testing.assert_allclose(weights.sum(axis=1), 1.0)
    off_diagonal = ~np.eye(8, dtype=bool)
    squared = np.where(off_diagonal, weights**2, 0.0)
    np.testing.assert_allclose(sharper, squared / squared.sum(axis=1, keepdims=True), rtol=1e-6)


def test_older_versions_weigh_less():
    tasks = [synthetic_task("same", f"{k}", depth=d) for k, d in enumerate((128, 128, 64, 0))]
    batch, history = Scored(tasks[:1], np.ones(1)), Scored(tasks[1:], np.ones(3))
    weights = make_estimator("embedding_softmax", half_life=64.0).predict(batch, history).weights
    np.testing.assert_allclose(weights[0], [0, 4 / 7, 2 / 7, 1 / 7])


def test_an_unknown_estimator_and_a_missing_reward_are_refused():
    with pytest.raises(ValueError, match="no estimator 'best'"):
        make_estimator("best")
    with pytest.raises(ValueError, match="not finite"):
        Scored(synthetic_mix(1, seed=0).tasks, np.array([np.nan]))
