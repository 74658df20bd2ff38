"""B_eff, its ratio and their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from service.baselines.effective_batch import (
    between_task_variance,
    bootstrap,
    calibrated_ratio,
    calibrated_size,
    effective_batch_size,
    prequential_ratio,
    within_task_variance,
)


def test_effective_batch_size_follows_the_formula():
    assert effective_batch_size(32, within=0.1, mse=0.0) == 32
    assert effective_batch_size(32, within=0.1, mse=0.1) == 16
    assert effective_batch_size(32, within=0.0, mse=0.0) == 0.0


def test_variances_are_unbiased():
    rng = np.random.default_rng(0)
    means = rng.normal(0.5, 0.2, 4_000)
    rewards = [rng.normal(mean, 0.3, int(rng.integers(2, 6))) for mean in means]
    assert within_task_variance(rewards).mean() == pytest.approx(0.09, rel=0.05)
    assert between_task_variance(rewards) == pytest.approx(0.04, rel=0.1)


def test_paired_intervals_are_narrow_where_errors_move_together():
    rng = np.random.default_rng(1)
    within, reference = rng.random(300) * 0.3, rng.random(300)
    interval = calibrated_ratio(within, 0.8 * reference, reference, seed=0)
    assert interval.low < interval.value < interval.high
    assert interval.high - interval.low < 0.03
    size = calibrated_size(32, within, reference, seed=0)
    assert size == calibrated_size(32, within, reference, seed=0)
    assert size.high - size.low > 0.5


def test_block_bootstrap_widens_the_interval_of_a_correlated_series():
    rng = np.random.default_rng(2)
    series = np.repeat(rng.normal(size=50), 8)
    mean = lambda picked: float(series[picked].mean())  # noqa: E731
    single, blocks = (bootstrap(mean, 400, block=block, seed=0) for block in (1, 16))
    assert blocks.high - blocks.low > 1.5 * (single.high - single.low)


def test_prequential_ratio_of_equal_errors_is_one():
    errors = np.random.default_rng(3).random(40)
    interval = prequential_ratio(errors, errors, seed=0)
    assert (interval.value, interval.low, interval.high) == (1.0, 1.0, 1.0)
