"""Comparing versions: the interval's arithmetic, and the two means over real rows."""

import numpy as np
import pytest
from sqlalchemy import Engine

from service.batches import comparison
from service.batches.comparison import Sample
from service.database.engine import transaction
from tests.conftest import Api
from tests.service.batches.ground import make_ground


@pytest.mark.parametrize(
    ("freedom", "known"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1e6, 1.960)],
)
def test_quantiles_are_those_of_the_tables(freedom: float, known: float) -> None:
    assert comparison.t_quantile(freedom) == pytest.approx(known, rel=0.01)


def test_the_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(5), 0
    for _ in range(2000):
        a, b = rng.normal(0.4, 0.1, 12), rng.normal(0.5, 0.4, 7)
        samples = (Sample(len(x), float(x.mean()), float(x.var(ddof=1))) for x in (a, b))
        low, high = comparison.difference(*samples)["interval"]
        covered += low <= 0.1 <= high
    assert 0.93 < covered / 2000 < 0.97


def test_too_few_rollouts_give_no_interval_rather_than_a_wrong_one() -> None:
    assert comparison.difference(Sample(0, None, None), Sample(1, 0.5, None)) == {
        "value": None,
        "interval": None,
    }
    assert comparison.difference(Sample(1, 0.5, None), Sample(1, 0.75, None)) == {
        "value": 0.25,
        "interval": None,
    }


def test_rewards_of_what_each_version_sampled_raw_and_net(engine: Engine, api: Api) -> None:
    ground = make_ground(engine, batching={"size": 4})
    for number in range(4):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number % 2)
    ground.form()
    ground.train()
    for number in range(4, 8):
        ground.trace(f"t{number}", policy_version=1)
        ground.grade(f"t{number}", 0.75)
    ground.trace("alone", policy_version=1)
    ground.grade("alone", 0.75)
    # as `yoro calibration-set import` brings it: no version answered anything
    ground.trace("evaluated", policy_version=1, messages=[{"role": "user", "content": "hello"}])
    ground.grade("evaluated", 0.0)
    with transaction(engine) as connection:
        found = comparison.compare(connection, ground.policy_id, 0, 1)
    assert (found["reward"]["a"]["n"], found["reward"]["b"]["n"]) == (4, 5)
    assert found["reward"]["difference"]["value"] == pytest.approx(0.25)
    assert found["net_of_difficulty"]["a"]["n"] == 4
    assert found["net_of_difficulty"]["b"]["n"] == 0
    path = f"/v1/policies/{ground.name}/versions/compare"
    assert api.call("dashboard", "GET", f"{path}?a=0&b=1").json()["reward"]["b"]["mean"] == 0.75
    assert api.call("dashboard", "GET", f"{path}?a=0&b=9").status_code == 404
