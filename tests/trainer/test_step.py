"""Outcomes of a batch, what each leaves untouched, memory, determinism, and that it learns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.errors import TrainingFailed
from service.policies import BaseModelSource, PolicySettings
from tests.trainer.batches import (
    TINY,
    distance,
    gradient,
    random_batch,
    rollout,
    row,
    with_objective,
)
from trainer.optimizer import AdapterOptimizer
from trainer.policy import PolicyModel, load_policy, sequence_logprobs
from trainer.sequences import RolloutRows
from trainer.step import StepResult, TrainingBatch, TrainingRollout, dry_run, train_batch


def no_version(version: int) -> Path | None:
    raise AssertionError(f"version {version} is not needed")


def snapshot(policy: PolicyModel, optimizer: AdapterOptimizer) -> list[bytes]:
    tensors = [*policy.parameters().values(), *optimizer.state_dict().values()]
    return [t.detach().clone().numpy().tobytes() for t in tensors]


def train(
    policy: PolicyModel, optimizer: AdapterOptimizer, batch: TrainingBatch, settings: PolicySettings = TINY
) -> StepResult:
    return train_batch(policy, optimizer, batch, settings, step_number=1, load_version=no_version)


@pytest.fixture
def optimizer(policy: PolicyModel) -> AdapterOptimizer:
    """With momentum from an earlier step, which a careless step would follow."""
    made = AdapterOptimizer(policy.parameters(), TINY.optimizer)
    assert train(policy, made, random_batch(50), with_objective(gate="none")).outcome == "stepped"
    return made


def advantages_of(batch: TrainingBatch, values: list[float]) -> TrainingBatch:
    members = [replace(m, advantage=a) for m, a in zip(batch.rollouts, values, strict=True)]
    return replace(batch, rollouts=members)


def rejected_rollout(number: int) -> TrainingRollout:
    return TrainingRollout(number, RolloutRows((), "untrainable", "too_long", (), 0, ()), 0.5, 1.0, True)


def test_batch_without_advantages_leaves_every_bit(policy: PolicyModel, optimizer: AdapterOptimizer) -> None:
    before = snapshot(policy, optimizer)
    result = train(policy, optimizer, advantages_of(random_batch(1), [0.0, 1e-10, 0, 0, -1e-10, 0]))
    assert result.outcome == "no_signal"
    assert snapshot(policy, optimizer) == before


@pytest.mark.parametrize(
    ("term", "message", "outcome"),
    [(0.3, 1, "stepped"), (1e-10, 1, "no_signal"), (0.3, 3, "no_signal")],
)
def test_terms_of_turns_count_as_advantages_where_they_reach_tokens(
    policy: PolicyModel, optimizer: AdapterOptimizer, term: float, message: int, outcome: str
) -> None:
    silent = advantages_of(random_batch(1), [0.0] * 6)
    first = silent.rollouts[0]
    rows = tuple(replace(r, messages=torch.ones_like(r.input_ids)) for r in first.rows.rows)
    taught = replace(first, rows=replace(first.rows, rows=rows), turns={message: term})
    batch = replace(silent, rollouts=[taught, *silent.rollouts[1:]])
    assert train(policy, optimizer, batch, with_objective(gate="none")).outcome == outcome


def test_batch_of_rejected_members_has_none_trainable(
    policy: PolicyModel, optimizer: AdapterOptimizer
) -> None:
    before = snapshot(policy, optimizer)
    result = train(policy, optimizer, TrainingBatch([rejected_rollout(1), rejected_rollout(2)], 2, 5.0))
    assert (result.outcome, result.policy_tokens) == ("none_trainable", 0)
    assert snapshot(policy, optimizer) == before


def test_batch_gated_out_as_a_whole_leaves_every_bit(
    policy: PolicyModel, optimizer: AdapterOptimizer
) -> None:
    before = snapshot(policy, optimizer)
    result = train(policy, optimizer, random_batch(1), with_objective(gate_delta=1e-12))
    assert result.outcome == "all_gated_out"
    assert sorted(result.gated_out) == [m.rollout_id for m in random_batch(1).rollouts]
    assert snapshot(policy, optimizer) == before


def test_only_gated_rollouts_having_advantages_is_no_signal(
    policy: PolicyModel, optimizer: AdapterOptimizer
) -> None:
    ids, mask = list(range(20, 30)), [False] * 5 + [True] * 5
    own = sequence_logprobs(policy, ids)[4:]
    batch = TrainingBatch(
        [rollout(1, [row(ids, mask, [-1e-4] * 5)], 0.7), rollout(2, [row(ids, mask, own)], 0.0)], 2, 5.0
    )
    before = snapshot(policy, optimizer)
    result = train(policy, optimizer, batch)
    assert (result.outcome, result.gated_out) == ("no_signal", (1,))
    assert snapshot(policy, optimizer) == before


def test_rejected_member_stays_in_the_denominator(policy: PolicyModel) -> None:
    batch = random_batch(1)
    settings = with_objective(gate="none", aggregation="sequence_mean")
    alone, _ = gradient(policy, batch, settings)
    wider = TrainingBatch([*batch.rollouts, rejected_rollout(99)], 7, 10.0)
    found, result = gradient(policy, wider, settings)
    assert result.metrics["untrainable"] == 1
    assert distance({name: g * 7 / 6 for name, g in found.items()}, alone) < 1e-6


def test_dry_run_leaves_every_bit(policy: PolicyModel, optimizer: AdapterOptimizer) -> None:
    before = snapshot(policy, optimizer)
    dry_run(policy, optimizer, random_batch(1), TINY)
    assert snapshot(policy, optimizer) == before


def test_same_inputs_give_the_same_bits(tiny_source: BaseModelSource) -> None:
    found = []
    for _ in range(2):
        policy = load_policy(tiny_source, TINY, device="cpu")
        optimizer = AdapterOptimizer(policy.parameters(), TINY.optimizer)
        for number in (1, 2, 3):
            train(policy, optimizer, random_batch(number), with_objective(gate="none"))
        found.append(snapshot(policy, optimizer))
    assert found[0] == found[1]


def test_step_reports_the_figures_of_the_design(policy: PolicyModel, optimizer: AdapterOptimizer) -> None:
    figures = train(policy, optimizer, random_batch(2), with_objective(gate="none")).metrics
    wanted = """n_traj n_rows n_tokens reward/mean reward/std reward/min reward/max baseline/mean baseline/std
        adv/mean adv/absmean adv/std adv/frac_zero kl_sample_train_v1 kl_sample_train_v2 is/mean is/min is/max
        is/ess is/trunc_frac is/gate_reject_frac kl_ref entropy loss/pg loss/kl grad_norm update_norm
        lora_norm lr tok_per_s peak_mem"""
    assert set(wanted.split()) <= set(figures)
    assert all(isinstance(value, float) for value in figures.values())


def test_version_zero_has_no_divergence_from_its_reference(tiny_source: BaseModelSource) -> None:
    """The reference is version 0: no policy starts from an adapter that it is not measured against."""
    policy = load_policy(tiny_source, TINY, device="cpu")
    optimizer = AdapterOptimizer(policy.parameters(), TINY.optimizer)
    figures = train(policy, optimizer, random_batch(2), with_objective(gate="none")).metrics
    assert (figures["kl_ref"], figures["loss/kl"]) == (0.0, 0.0)


def test_step_that_moves_nothing_is_a_failure(tiny_source: BaseModelSource) -> None:
    settings = with_objective(gate="none").model_copy(
        update={"optimizer": TINY.optimizer.model_copy(update={"learning_rate": 1e-45})}
    )
    policy = load_policy(tiny_source, settings, device="cpu")
    optimizer = AdapterOptimizer(policy.parameters(), settings.optimizer)
    with pytest.raises(TrainingFailed) as failure:
        train(policy, optimizer, random_batch(2), settings)
    assert failure.value.code == "adapter_unchanged"


def test_lora_norm_is_that_of_the_weight_change(policy: PolicyModel, optimizer: AdapterOptimizer) -> None:
    figures = train(policy, optimizer, random_batch(2), with_objective(gate="none")).metrics
    held, total = policy.parameters(), 0.0
    for name, a in held.items():
        if ".lora_A." in name:
            total += (held[name.replace("lora_A", "lora_B")] @ a * 8 / 4).square().sum().item()
    assert figures["lora_norm"] == pytest.approx(total**0.5, rel=1e-4)


class Memory:
    """A device that fits only so many tokens in one pass."""

    def __init__(self, policy: PolicyModel, tokens: int) -> None:
        self.sizes: list[int] = []
        self._tokens = tokens
        policy.base.base_model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, _module: Any, _inputs: Any, options: dict[str, Any]) -> None:
        self.sizes.append(options["input_ids"].numel())
        if self.sizes[-1] > self._tokens:
            raise torch.OutOfMemoryError("no room")


def test_out_of_memory_halves_the_budget_and_gives_the_same_gradient(policy: PolicyModel) -> None:
    batch, settings = random_batch(1), with_objective(gate="none")
    settings = settings.model_copy(
        update={"sequences": settings.sequences.model_copy(update={"token_budget": 256})}
    )
    expected, _ = gradient(policy, batch, settings)
    memory = Memory(policy, 64)
    found, result = gradient(policy, batch, settings)
    assert result.outcome == "stepped"
    assert max(memory.sizes) > 64 >= memory.sizes[-1]
    assert distance(found, expected) < 1e-5


def test_row_that_never_fits_is_a_failure_of_the_batch(
    policy: PolicyModel, optimizer: AdapterOptimizer
) -> None:
    before = snapshot(policy, optimizer)
    Memory(policy, 3)
    with pytest.raises(TrainingFailed) as failure:
        train(policy, optimizer, random_batch(1))
    assert failure.value.code == "out_of_memory"
    assert snapshot(policy, optimizer) == before


def test_gradient_that_is_not_finite_is_a_failure_and_leaves_every_bit(
    policy: PolicyModel, optimizer: AdapterOptimizer
) -> None:
    before = snapshot(policy, optimizer)
    handle = policy.base.base_model.register_forward_hook(
        lambda _module, _inputs, output: (
            output.last_hidden_state.register_hook(lambda g: g * torch.nan) and None
        )
    )
    with pytest.raises(TrainingFailed) as failure:
        train(policy, optimizer, random_batch(1), with_objective(gate="none", reference_kl=0.0))
    handle.remove()
    assert failure.value.code == "non_finite_gradient"
    assert snapshot(policy, optimizer) == before


def test_broken_rows_are_a_failure_of_the_batch(policy: PolicyModel, optimizer: AdapterOptimizer) -> None:
    broken = rollout(1, [row([5, 6, 70_000], [False, False, True])], 1.0)
    with pytest.raises(TrainingFailed):
        train(policy, optimizer, TrainingBatch([broken], 1, 1.0))


def test_failure_to_load_a_version_is_not_the_batchs_fault(
    policy: PolicyModel, optimizer: AdapterOptimizer
) -> None:
    member = rollout(1, [row([5, 6, 7], [False, False, True])], 1.0, version=3, head=False)

    def load_version(_: int) -> Path | None:
        raise OSError("store is away")

    with pytest.raises(OSError, match="store is away"):
        train_batch(
            policy, optimizer, TrainingBatch([member], 1, 1.0), TINY, step_number=2, load_version=load_version
        )


def test_policy_learns_which_of_two_answers_is_rewarded(tiny_source: BaseModelSource) -> None:
    """One rollout a step and arm, sampled from the policy itself; reward 1 for answer 100."""
    settings = with_objective(reference_kl=0.0, gate="none").model_copy(
        update={"optimizer": TINY.optimizer.model_copy(update={"learning_rate": 1e-2})}
    )
    policy = load_policy(tiny_source, settings, device="cpu")
    optimizer = AdapterOptimizer(policy.parameters(), settings.optimizer)
    prompt, arms = [40, 41, 42], (100, 101)

    def share() -> float:
        scores = torch.tensor([sequence_logprobs(policy, [*prompt, arm])[-1] for arm in arms])
        return float(scores.softmax(0)[0])

    first = share()
    for number in range(1, 21):
        members = [
            rollout(i, [row([*prompt, arm], [False] * 3 + [True])], 0.5 if arm == 100 else -0.5)
            for i, arm in enumerate(arms)
        ]
        train_batch(
            policy,
            optimizer,
            TrainingBatch(members, 2, 1.0),
            settings,
            step_number=number,
            load_version=no_version,
        )
    assert share() > max(0.95, first)
