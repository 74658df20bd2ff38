"""The Gaussian process against a slow reference, and what its fit learns."""

from __future__ import annotations

import numpy as np
import pytest

from service.baselines import gaussian_process
from service.baselines.estimators import PRIOR_REWARD, Scored, make_estimator
from service.baselines.features import exclusions
from service.baselines.gaussian_process import GaussianProcess
from service.baselines.kernels import context_fields, task_kernels
from service.baselines.marginal_likelihood import Objective, fitted
from tests.service.baselines.synthetic_tasks import EMPTY, synthetic_mix, synthetic_task


def tangled_mix() -> tuple[Scored, Scored]:
    """Twelve rollouts and twenty earlier ones, some of which share sessions or conversations."""
    prompts = [f"{word} {k}" for k, word in enumerate(["add", "take", "prove", "write"] * 8)]
    tasks = [
        synthetic_task(
            prompt,
            f"{k}",
            session_id=f"{k % 11}" if k % 3 == 0 else None,
            contains=[f"{k % 7}"] if k % 5 == 0 else [],
            depth=k // 8,
            context={"customer": f"{k % 2}", "pages": k},
        )
        for k, prompt in enumerate(prompts)
    ]
    rewards = np.random.default_rng(0).random(32)
    return Scored(tasks[:12], rewards[:12]), Scored(tasks[12:], rewards[12:])


def reference_weights(process: GaussianProcess, batch: Scored, history: Scored) -> np.ndarray:
    """−[(P_SS)⁻¹ P_S,rest]_i computed plainly from one inverse."""
    tasks = [*batch.tasks, *history.tasks]
    excluded = exclusions(tasks, len(batch.tasks))
    shunned = (excluded & ~np.eye(*excluded.shape, dtype=bool)).any(axis=0)
    known = [task for task, is_shunned in zip(tasks, shunned, strict=True) if not is_shunned]
    earlier = [task for task in known if any(task is other for other in history.tasks)]
    precision = np.linalg.inv(process.covariance(tasks, earlier, known))
    weights = np.zeros(excluded.shape)
    for i, row in enumerate(excluded):
        inside, outside = np.flatnonzero(row), np.flatnonzero(~row)
        block = np.linalg.inv(precision[np.ix_(inside, inside)])
        rows = -block @ precision[np.ix_(inside, outside)]
        weights[i, outside] = rows[inside.tolist().index(i)]
    return weights


def test_weights_equal_the_formula_with_excluded_neighbours_marginalised_out():
    batch, history = tangled_mix()
    process = GaussianProcess({"embedding": 0.5, "context:customer": 0.3}, half_life=4.0)
    made = process.predict(batch, history)
    np.testing.assert_allclose(made.weights, reference_weights(process, batch, history), atol=1e-9)


def test_baseline_and_variance_equal_the_posterior_without_the_rollout():
    batch, history = synthetic_mix(6, seed=1), synthetic_mix(20, seed=2)
    process = GaussianProcess(noise=0.1)
    tasks, rewards = [*batch.tasks, *history.tasks], [*batch.rewards, *history.rewards]
    made = process.predict(batch, history)
    covariance = 0.1 * process.covariance(tasks, history.tasks, tasks)
    for i in range(6):
        rest = np.delete(np.arange(26), i)
        gain = covariance[i, rest] @ np.linalg.inv(covariance[np.ix_(rest, rest)])
        posterior = PRIOR_REWARD + gain @ (np.array(rewards)[rest] - PRIOR_REWARD)
        assert made.values[i] == pytest.approx(posterior)
        spread = covariance[i, i] - 0.1 - gain @ covariance[rest, i]
        assert made.variance[i] == pytest.approx(spread)


def test_features_that_say_nothing_leave_nearly_the_mean_of_the_others():
    rng = np.random.default_rng(3)
    mixes = [synthetic_mix(size, seed) for size, seed in ((32, 4), (512, 5))]
    batch, history = (Scored(mix.tasks, rng.random(len(mix.tasks)).round()) for mix in mixes)
    values = fitted(GaussianProcess(), history).predict(batch, history).values
    pooled = np.concatenate([batch.rewards, history.rewards]).mean()
    assert np.abs(values - pooled).max() < 0.12


def test_a_fit_finds_the_context_field_that_carries_difficulty():
    rng = np.random.default_rng(6)
    customers, desks = rng.integers(4, size=256), rng.integers(4, size=256)
    tasks = [
        synthetic_task("same words", f"{k}", context={"customer": f"{c}", "desk": f"{d}"})
        for k, (c, d) in enumerate(zip(customers, desks, strict=True))
    ]
    history = Scored(tasks, (rng.random(256) < 0.1 + 0.25 * customers).astype(float))
    amplitudes = fitted(GaussianProcess(), history).amplitudes
    assert amplitudes["context:customer"] > 2 * amplitudes["context:desk"]


def test_the_gradient_of_the_likelihood_is_right():
    mix = synthetic_mix(24, seed=7)
    kernels = list(task_kernels(mix.tasks, mix.tasks, context_fields(mix.tasks)).values())
    prior = np.full(len(kernels), -1.0)
    objective = Objective(mix.rewards - 0.5, 25.0 + np.eye(24), kernels, prior, np.ones(len(kernels)))
    at, step = prior + 0.3, 1e-5
    _, gradient = objective(at)
    for m in range(len(kernels)):
        moved = np.eye(len(kernels))[m] * step
        slope = (objective(at + moved)[0] - objective(at - moved)[0]) / (2 * step)
        assert gradient[m] == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_stored_parameters_rebuild_the_same_process():
    batch, history = synthetic_mix(8, seed=8), synthetic_mix(40, seed=9)
    made = fitted(GaussianProcess(), history).predict(batch, history)
    again = make_estimator("gaussian_process", **made.parameters).predict(batch, history)
    np.testing.assert_array_equal(made.values, again.values)


def test_beyond_the_cap_the_batch_and_the_newest_history_enter(monkeypatch):
    monkeypatch.setattr(gaussian_process, "MAX_POINTS", 20)
    batch, history = synthetic_mix(12, seed=10), synthetic_mix(30, seed=11)
    weights = GaussianProcess().predict(batch, history).weights
    assert (weights[:, 12 : 12 + 22] == 0).all()
    assert (weights[:, -8:] != 0).all()


def test_a_batch_beyond_the_cap_is_scored_in_parts(monkeypatch):
    monkeypatch.setattr(gaussian_process, "MAX_POINTS", 10)
    batch = synthetic_mix(25, seed=12)
    made = GaussianProcess().predict(batch, EMPTY)
    assert ((made.weights != 0).sum(axis=1) == 9).all()
    assert (np.diagonal(made.weights) == 0).all()
