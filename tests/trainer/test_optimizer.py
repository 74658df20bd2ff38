"""AdamW by name: warm-up, clipping, refusals, and state that survives."""

import pytest
import torch

from service.errors import AdapterRejected, TrainingFailed
from service.policies import Optimizer
from trainer.optimizer import AdapterOptimizer


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(3, 2, generator=generator)) for name in ("a", "b")}


def give_gradient(held: dict[str, torch.nn.Parameter], seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in held.values():
        parameter.grad = torch.randn(3, 2, generator=generator) * size


def test_learning_rate_warms_up_by_step_number_and_stays() -> None:
    optimizer = AdapterOptimizer(parameters(), Optimizer(learning_rate=3e-3, warmup_steps=3))
    assert [optimizer.learning_rate(n) for n in (1, 2, 3, 4, 1000)] == pytest.approx(
        [1e-3, 2e-3, 3e-3, 3e-3, 3e-3]
    )
    assert AdapterOptimizer(parameters(), Optimizer(warmup_steps=0)).learning_rate(1) == 2e-5


def test_step_is_adamw_on_the_clipped_gradient() -> None:
    held, twin = parameters(), parameters()
    settings = Optimizer(learning_rate=1e-3, warmup_steps=0, clip_norm=0.5, weight_decay=0.1)
    optimizer = AdapterOptimizer(held, settings)
    plain = torch.optim.AdamW(twin.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in (1, 2):
        give_gradient(held, step)
        give_gradient(twin, step)
        expected = torch.nn.utils.clip_grad_norm_(twin.values(), 0.5).item()
        assert optimizer.step(step) == pytest.approx(expected)
        plain.step()
    for name in held:
        torch.testing.assert_close(held[name], twin[name])


def test_gradient_is_forgotten_after_the_step() -> None:
    held = parameters()
    optimizer = AdapterOptimizer(held, Optimizer())
    give_gradient(held, 1)
    optimizer.step(1)
    assert all(parameter.grad is None for parameter in held.values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_gradient_that_is_not_finite_never_steps(value: float) -> None:
    held = parameters()
    optimizer = AdapterOptimizer(held, Optimizer(warmup_steps=0))
    give_gradient(held, 1)
    optimizer.step(1)
    before = {name: p.detach().clone() for name, p in held.items()}
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    give_gradient(held, 2)
    held["b"].grad[0, 0] = value
    with pytest.raises(TrainingFailed, match="not finite"):
        optimizer.step(2)
    assert all(torch.equal(held[name], before[name]) for name in held)
    assert all(torch.equal(value, state[name]) for name, value in optimizer.state_dict().items())


def test_no_parameters_or_frozen_ones_are_refused() -> None:
    with pytest.raises(TrainingFailed):
        AdapterOptimizer({}, Optimizer())
    frozen = parameters()
    frozen["a"].requires_grad_(False)
    with pytest.raises(TrainingFailed):
        AdapterOptimizer(frozen, Optimizer())


def test_state_goes_by_name_not_by_order() -> None:
    held = parameters()
    optimizer = AdapterOptimizer(held, Optimizer(warmup_steps=0))
    give_gradient(held, 1)
    optimizer.step(1)
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    turned = {name: torch.nn.Parameter(held[name].detach().clone()) for name in reversed(held)}
    other = AdapterOptimizer(turned, Optimizer(warmup_steps=0))
    other.load_state_dict(state)
    give_gradient(held, 2)
    for name, parameter in turned.items():
        parameter.grad = held[name].grad.clone()
    optimizer.step(2)
    other.step(2)
    assert all(torch.equal(held[name], turned[name]) for name in held)


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    held = parameters()
    optimizer = AdapterOptimizer(held, Optimizer())
    give_gradient(held, 1)
    optimizer.step(1)
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    with pytest.raises(AdapterRejected):
        optimizer.load_state_dict({name: value for name, value in state.items() if name != "a.exp_avg"})
    with pytest.raises(AdapterRejected):
        optimizer.load_state_dict({**state, "a.exp_avg": torch.zeros(5)})
    assert all(torch.equal(value, state[name]) for name, value in optimizer.state_dict().items())


def test_empty_state_is_that_of_a_first_step() -> None:
    optimizer = AdapterOptimizer(held := parameters(), Optimizer())
    assert optimizer.state_dict() == {}
    give_gradient(held, 1)
    optimizer.step(1)
    optimizer.load_state_dict({})
    assert optimizer.state_dict() == {}


def test_other_settings_hold_from_the_next_step_on() -> None:
    first, other = Optimizer(warmup_steps=0), Optimizer(warmup_steps=0, betas=(0.5, 0.5), learning_rate=1e-3)
    held, twin = parameters(), parameters()
    optimizer, expected = AdapterOptimizer(held, first), AdapterOptimizer(twin, other)
    optimizer.use(other)
    for given in (held, twin):
        give_gradient(given, 1)
    optimizer.step(1)
    expected.step(1)
    assert all(torch.equal(held[name], twin[name]) for name in held)
