"""`auto`: chosen from earlier batches, slow to switch, right in the end."""

from __future__ import annotations

import itertools
import json

import numpy as np

from service.baselines.estimators import Scored
from service.baselines.selection import CANDIDATES, Selection, advanced, choice, predictions
from tests.service.baselines.synthetic_tasks import synthetic_mix, synthetic_task


def drifting_errors(batches: int, seed: int) -> list[dict[str, float]]:
    """`a` is better for the first half, `b` afterwards."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(0.2, 0.02, batches)
    better, worse = shared - 0.02, shared + rng.normal(0, 0.01, batches)
    half = batches // 2
    return [
        {"a": float(better[t]), "b": float(worse[t])}
        if t < half
        else {"a": float(worse[t]), "b": float(better[t])}
        for t in range(batches)
    ]


def test_choice_follows_a_stream_whose_best_estimator_changes():
    for seed in range(5):
        errors = drifting_errors(200, seed)
        chosen = "b"
        choices = []
        for t in range(200):
            choices.append(chosen)
            chosen = choice(chosen, tuple(errors[max(0, t - 31) : t + 1]))
        assert choices[0] == "b"
        assert choices[30] == choices[99] == "a"
        assert choices[150] == choices[199] == "b"
        assert sum(x != y for x, y in itertools.pairwise(choices)) == 2


def test_noise_alone_hardly_ever_switches():
    rng = np.random.default_rng(0)
    switches, chosen = 0, "a"
    errors = [{name: float(rng.normal(0.2, 0.01)) for name in "abc"} for _ in range(200)]
    for t in range(200):
        following = choice(chosen, tuple(errors[max(0, t - 31) : t + 1]))
        switches += following != chosen
        chosen = following
    assert switches <= 2


def test_a_few_batches_switch_nothing():
    assert choice("a", tuple({"a": 1.0, "b": 0.0} for _ in range(7))) == "a"


def test_the_choice_for_a_batch_does_not_depend_on_that_batch():
    """The state that scores a batch exists before the batch's rewards do."""
    state, history = Selection(), Scored([], np.zeros(0))
    for seed in range(3):
        batch = synthetic_mix(8, seed)
        made = predictions(state, batch, history)
        flipped = predictions(state, Scored(batch.tasks, 1 - batch.rewards), history)
        for name in CANDIDATES:
            assert made[name].parameters == flipped[name].parameters
            np.testing.assert_array_equal(made[name].weights, flipped[name].weights)
        state = advanced(state, made, batch, history)
        history = Scored([*history.tasks, *batch.tasks], np.append(history.rewards, batch.rewards))


def test_state_survives_json():
    batch, history = synthetic_mix(8, seed=1), synthetic_mix(16, seed=2)
    state = advanced(Selection(), predictions(Selection(), batch, history), batch, history)
    again = Selection.from_document(json.loads(json.dumps(state.as_document())))
    assert again == state
    assert again.candidate("gaussian_process") == state.candidate("gaussian_process")


def test_auto_leaves_the_gaussian_process_where_tasks_recur_and_words_mislead():
    """Every task key has a difficulty of its own that its words, length and context do not show."""
    rng = np.random.default_rng(4)
    means = rng.integers(2, size=12).astype(float)

    def drawn(t: int) -> Scored:
        keys = rng.permutation(12)[:8]
        tasks = [synthetic_task("same words", f"{t}/{k}") for k in keys]
        keyed = [
            type(task)(*(getattr(task, f) if f != "task_key" else f"{k}" for f in task.__slots__))
            for task, k in zip(tasks, keys, strict=True)
        ]
        return Scored(keyed, means[keys])

    state, history = Selection(), drawn(0)
    for t in range(1, 20):
        batch = drawn(t)
        state = advanced(state, predictions(state, batch, history), batch, history)
        tasks = [*history.tasks, *batch.tasks][-64:]
        history = Scored(tasks, np.concatenate([history.rewards, batch.rewards])[-64:])
    assert state.chosen in {"ema", "group_mean"}
