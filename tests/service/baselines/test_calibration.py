"""The calibration protocol on mixes whose true means are known, and on a real table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from service.baselines.calibration import ReplayedBatch, replayed, scores
from service.baselines.calibration_sets import (
    CalibrationSet,
    calibration_line,
    read_calibration_set,
)
from service.baselines.effective_batch import REFERENCE, Interval, effective_batch_size, prequential_ratio
from service.baselines.features import task_features
from service.baselines.group_size import break_even_rho, gradient_variance
from service.baselines.selection import AUTO
from tests.service.baselines.synthetic_tasks import FAMILIES, pseudo_embedding, synthetic_task

BATCH_SIZE = 16


def pseudo_encode(texts):
    return np.stack([pseudo_embedding(text) for text in texts])


def family_set(size: int, seed: int) -> tuple[CalibrationSet, np.ndarray]:
    """Tasks of three families with four to eight rewards each, and their true means."""
    rng = np.random.default_rng(seed)
    families = rng.choice(list(FAMILIES), size)
    means = np.array([FAMILIES[str(family)] for family in families])
    prompts = [f"{family} {'x' * int(rng.integers(1, 40))}" for family in families]
    tasks = [synthetic_task(prompt, f"{k}") for k, prompt in enumerate(prompts)]
    rewards = [(rng.random(int(rng.integers(4, 9))) < mean).astype(float) for mean in means]
    return CalibrationSet(tasks, rewards), means


@pytest.fixture(scope="module")
def family_replays() -> tuple[CalibrationSet, np.ndarray, list[ReplayedBatch]]:
    data, means = family_set(240, seed=0)
    stream = replayed(data, batch_size=BATCH_SIZE, window_batches=16, replays=6, seed=0)
    return data, means, list(stream)


def test_no_task_recurs_within_a_replay_and_replays_start_cold(family_replays):
    _, _, batches = family_replays
    for first in range(0, len(batches), 15):
        replay = batches[first : first + 15]
        members = np.concatenate([batch.members for batch in replay])
        assert len(np.unique(members)) == len(members) == 240
        np.testing.assert_array_equal(replay[0].baselines[AUTO], replay[0].baselines["gaussian_process"])


def test_calibrated_errors_agree_with_the_true_means(family_replays):
    data, means, batches = family_replays
    found = scores(data, batches, batch_size=BATCH_SIZE, seed=0)
    noise = float((means * (1 - means)).mean())
    for name in (REFERENCE, "embedding_softmax", "gaussian_process"):
        errors = [np.mean((b.baselines[name] - means[b.members]) ** 2) for b in batches]
        true_size = effective_batch_size(BATCH_SIZE, noise, float(np.mean(errors)))
        assert found[name].size.low < true_size < found[name].size.high
    assert found[AUTO].ratio.low > 1.2


def single_ratio(batches: list[ReplayedBatch], name: str, own_share: float = 0.0) -> Interval:
    """The bake-off's ratio; `own_share` moves every baseline towards its own reward, which is a leak."""
    squared = {
        key: np.array([((share * (b.rewards - b.baselines[key])) ** 2).sum() for b in batches])
        for key, share in ((name, 1.0 - own_share), (REFERENCE, 1.0))
    }
    return prequential_ratio(squared[name], squared[REFERENCE], seed=0)


def test_single_rollouts_tell_the_calibrated_ratio(family_replays):
    data, _, batches = family_replays
    calibrated = scores(data, batches, batch_size=BATCH_SIZE, seed=0)
    for name in ("length_buckets", "embedding_softmax", "gaussian_process"):
        true_ratio = calibrated[name].ratio.value
        single = single_ratio(batches, name)
        assert single.low <= true_ratio <= single.high
        # a tenth of its own reward makes a baseline look better than it is, and the test sees it
        assert single_ratio(batches, name, own_share=0.1).low > true_ratio


def test_equal_seeds_give_equal_replays():
    data, _ = family_set(64, seed=1)
    runs = [list(replayed(data, batch_size=8, window_batches=4, replays=1, seed=3)) for _ in "ab"]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a.baselines[AUTO], b.baselines[AUTO])


def test_a_line_goes_out_and_comes_back():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "add\u2028these"}]
    tools = [{"name": "sum", "description": "Adds."}]
    line = calibration_line("t", messages, tools, {"tier": 1}, [0.0, 0.5])
    assert len(line.splitlines()) == 1
    data = read_calibration_set([line], pseudo_encode)
    assert data.tasks[0].features == task_features(messages, tools, {"tier": 1})
    assert data.rewards[0].tolist() == [0.0, 0.5]


def test_a_null_reward_is_missing_not_zero():
    line = {"task_id": "a", "prompt": "p", "rewards": [1, None, 0], "response": "secret"}
    data = read_calibration_set([json.dumps(line), ""], pseudo_encode)
    assert data.rewards[0].tolist() == [1.0, 0.0]
    assert "secret" not in data.tasks[0].features.text
    with pytest.raises(ValueError, match="none of 1 tasks has 3 rewards"):
        read_calibration_set([json.dumps(line)], pseudo_encode, minimum_rewards=3)


GOOD = {"task_id": "a", "prompt": "p", "rewards": [1, 0]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: must be an object"),
        (json.dumps({"task_id": "b"}), "line 2: `prompt` must be a string"),
        (json.dumps({**GOOD, "task_id": 7}), "line 2: `task_id` must be a string"),
        (json.dumps({**GOOD, "rewards": 1}), "line 2: `rewards` must be a list"),
        (json.dumps({**GOOD, "rewards": [0, "1"]}), "line 2: `rewards` holds '1'"),
        (json.dumps({**GOOD, "rewards": [0, 7]}), "line 2: `rewards` holds 7, which is not a number from 0"),
        (json.dumps({**GOOD, "rewards": [0, True]}), "line 2: `rewards` holds True"),
        ('{"task_id": "b", "prompt": "p", "rewards": [NaN]}', "line 2: not JSON"),
        (json.dumps({**GOOD, "context": 3}), "line 2: `context` must be an object"),
        (json.dumps({**GOOD, "system": ["x"]}), "line 2: `system` must be a string"),
        (json.dumps(GOOD), "line 2: `task_id` 'a' is on line 1 already"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(line, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        read_calibration_set([json.dumps(GOOD), line], pseudo_encode)


def test_auto_does_no_harm_on_a_real_table(shared_tables: Path):
    """With stand-in embeddings; the figures with real ones are in benchmarks/baselines.py."""
    file = shared_tables / "smollm2_135m_reasoning_gym_local.jsonl"
    data = read_calibration_set(file.read_text().splitlines(), pseudo_encode)
    stream = replayed(data, batch_size=32, window_batches=16, replays=20, seed=0)
    assert scores(data, list(stream), batch_size=32, seed=0)[AUTO].ratio.high > 1.0


def test_group_size_trade_off():
    assert gradient_variance(1, rho=0.5, kappa=0.0) == 1.5
    assert gradient_variance(2, rho=0.5, kappa=0.0) == 2.0
    assert break_even_rho(2, kappa=0.0) == 1.0
    rho = break_even_rho(8, kappa=0.1)
    assert gradient_variance(1, rho=rho, kappa=0.1) == pytest.approx(gradient_variance(8, rho=rho, kappa=0.1))
