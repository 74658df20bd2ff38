"""Every switch of the objective, on numbers worked out by hand."""

import math

import pytest
import torch

from service.policies import Objective
from trainer.objective import (
    Tokens,
    binary_kl,
    divergences,
    gate,
    importance_weights,
    k1_advantages,
    log_ratio,
    loss,
    token_weights,
)

HALF = math.log(0.5)
QUARTER = math.log(0.25)
NONE = Objective(gate="none", reference_kl=0.0)


def tokens(
    logprobs: list[float],
    sampler: list[float],
    *,
    reference: list[float] | None = None,
    owner: list[int] | None = None,
    advantages: list[float] | None = None,
    weights: list[float] | None = None,
) -> Tokens:
    count = len(logprobs)
    return Tokens(
        torch.tensor(logprobs, requires_grad=True),
        torch.tensor(sampler),
        None if reference is None else torch.tensor(reference),
        torch.tensor(owner or [0] * count),
        torch.tensor(advantages or [1.0] * count),
        torch.tensor(weights or [1.0] * count),
    )


def slope(given: Tokens, settings: Objective) -> list[float]:
    """Gradient of the total towards each log-probability."""
    total = loss(given, settings).total
    (found,) = torch.autograd.grad(total, given.logprobs)
    return found.tolist()


def test_token_level_divides_by_batch_size_and_expected_length() -> None:
    assert token_weights("token_level", [3, 5], 4, 10.0) == [1 / 40, 1 / 40]


def test_sequence_mean_divides_by_own_length() -> None:
    assert token_weights("sequence_mean", [3, 5], 4, 10.0) == [1 / 12, 1 / 20]


def test_token_mean_divides_by_all_tokens() -> None:
    assert token_weights("token_mean", [3, 5], 4, 10.0) == [1 / 8, 1 / 8]


def test_slope_is_advantage_times_ratio_times_weight() -> None:
    given = tokens([HALF, QUARTER], [QUARTER, HALF], advantages=[0.5, -2.0], weights=[0.1, 0.2])
    assert slope(given, NONE) == pytest.approx([-0.5 * 2 * 0.1, 2.0 * 0.5 * 0.2])


def test_weight_is_truncated_at_the_cap_and_only_there() -> None:
    given = tokens([HALF, HALF], [math.log(0.05), math.log(0.25)])
    assert slope(given, NONE) == pytest.approx([-5.0, -2.0])
    assert slope(given, Objective(gate="none", reference_kl=0.0, weight_cap=None)) == pytest.approx(
        [-10.0, -2.0]
    )


def test_unknown_sampler_logprob_counts_as_ratio_one() -> None:
    given = tokens([HALF] * 4, [math.nan, math.inf, -math.inf, HALF])
    assert slope(given, NONE) == [-1.0] * 4


def test_log_ratio_is_clamped_at_twenty() -> None:
    assert log_ratio(torch.tensor([-1.0, -1e4]), torch.tensor([-1e4, -1.0])).tolist() == [20.0, -20.0]


def test_binary_kl_of_known_probabilities() -> None:
    found = binary_kl(torch.tensor([HALF, HALF]), torch.tensor([QUARTER, HALF]))
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert found.tolist() == pytest.approx([expected, 0.0], abs=1e-7)


def test_binary_kl_is_finite_at_the_ends() -> None:
    found = binary_kl(torch.tensor([0.0, -1e4, math.log(0.3)]), torch.tensor([-1e4, 0.0, math.nan]))
    assert found[:2].tolist() == pytest.approx([math.log(1e6)] * 2, rel=1e-4)
    assert found[2] == 0


def test_gate_keeps_or_rejects_whole_rollouts_by_their_mean() -> None:
    given = tokens([HALF] * 4, [HALF, QUARTER, HALF, HALF], owner=[0, 0, 1, 1])
    mean = divergences(given)
    assert mean.tolist() == pytest.approx([0.13081 / 2, 0.0], abs=1e-4)
    assert gate(given, Objective(gate_delta=0.06)).tolist() == [False, True]
    assert gate(given, Objective(gate_delta=0.07)).tolist() == [True, True]
    assert gate(given, Objective(gate="none", gate_delta=0.06)).tolist() == [True, True]


def test_rejected_rollout_contributes_neither_term() -> None:
    given = tokens([HALF] * 2, [QUARTER, HALF], reference=[QUARTER] * 2, owner=[0, 1])
    found = slope(given, Objective(gate_delta=0.06, reference_kl=0.1))
    assert found[0] == 0
    assert found[1] == pytest.approx(-1.0 + 0.1 * math.log(2))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 1.0, -1.1),
        (1.5, 1.0, 0.0),
        (1.5, -1.0, 1.5),
        (0.5, 1.0, -0.5),
        (0.5, -1.0, 0.0),
    ],
)
def test_ppo_has_no_slope_beyond_the_clip_in_the_advantages_direction(
    ratio: float, advantage: float, expected: float
) -> None:
    settings = Objective(ppo_clip=0.2, reference_kl=0.0, gate_delta=1e-9, weight_cap=1e-9)
    given = tokens([HALF], [HALF - math.log(ratio)], advantages=[advantage])
    assert slope(given, settings) == pytest.approx([expected])


def test_ppo_with_unknown_sampler_logprobs_is_plain_reinforce() -> None:
    assert slope(tokens([HALF], [math.nan]), Objective(ppo_clip=0.2, reference_kl=0.0)) == [-1.0]


def test_k2_slope_is_the_log_ratio_weighted_by_the_capped_ratio() -> None:
    settings = Objective(gate="none", reference_kl=0.5, weight_cap=1.5)
    given = tokens([HALF], [QUARTER], reference=[QUARTER], advantages=[0.0])
    assert slope(given, settings) == pytest.approx([0.5 * 1.5 * math.log(2)])


def test_k3_slope_is_one_minus_the_inverse_ratio() -> None:
    settings = Objective(gate="none", reference_kl=0.5, reference_kl_estimator="k3")
    given = tokens([HALF], [HALF], reference=[QUARTER], advantages=[0.0])
    assert slope(given, settings) == pytest.approx([0.5 * (1 - 0.5)])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_reference_terms_do_not_overflow(estimator: str) -> None:
    settings = Objective(gate="none", reference_kl=0.5, reference_kl_estimator=estimator)
    given = tokens([-1e4, -1.0], [-1.0, -1.0], reference=[-1.0, -1e4])
    assert all(math.isfinite(value) for value in slope(given, settings))


def test_k1_acts_through_the_advantages_alone() -> None:
    settings = Objective(gate="none", reference_kl=0.5, reference_kl_estimator="k1_in_reward")
    given = tokens([HALF], [HALF], reference=[QUARTER])
    assert slope(given, settings) == [-1.0]


def test_k1_is_centred_on_the_other_rollouts() -> None:
    found = k1_advantages(
        torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.5, -5.0]), torch.tensor([0, 0, 1]), 0.1
    )
    assert found.tolist() == pytest.approx([0.1 * (2 - 0.5), 0.1 * (2 - 0.5), 0.1 * (0.5 - 2)])


def test_k1_of_a_rollout_does_not_move_its_own_centre() -> None:
    reference, owner = torch.zeros(3), torch.tensor([0, 1, 1])
    before = k1_advantages(torch.tensor([-1.0, -2.0, -3.0]), reference, owner, 1.0)
    after = k1_advantages(torch.tensor([-9.0, -2.0, -3.0]), reference, owner, 1.0)
    assert (after - before)[0] == pytest.approx(8.0)


def test_importance_weights_carry_no_gradient() -> None:
    assert not importance_weights(tokens([HALF], [QUARTER]), NONE).requires_grad


def test_gate_of_the_design_lets_one_wild_token_pass_in_a_long_rollout() -> None:
    """Why the gate goes together with a cap (design/training.md): .01 -> .9 passes once T >= 742..."""
    ratio = binary_kl(torch.tensor([math.log(0.9)]), torch.tensor([math.log(0.01)])).item()
    assert 741 < ratio / 3e-3 < 762
