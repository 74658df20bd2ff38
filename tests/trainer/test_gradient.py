"""What the gradient of a batch is, and what it must not depend on.

Semantics that these lock: the formula; whole-batch denominators; the loss mask; the gate.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from service.policies import PolicySettings
from tests.trainer.batches import (
    distance,
    gradient,
    random_batch,
    random_row,
    rollout,
    row,
    shake,
    with_objective,
    with_sequences,
)
from tests.trainer.slow_reference import row_logprobs, slow_gradient, stock_model
from trainer.checkpoint import load_adapter, save_adapter
from trainer.policy import PolicyModel, load_policy, sequence_logprobs
from trainer.step import TrainingBatch

OBJECTIVES: list[dict[str, Any]] = [
    {"gate_delta": 2e-4},
    {"gate_delta": 2e-4, "aggregation": "sequence_mean", "reference_kl": 0.0},
    {"aggregation": "token_mean", "gate": "none"},
    {"gate": "none", "weight_cap": None},
    {"gate": "none", "weight_cap": 1.5, "reference_kl": 0.5},
    {"gate_delta": 2e-4, "reference_kl": 0.5, "reference_kl_estimator": "k3"},
    {"gate": "none", "reference_kl": 0.5, "reference_kl_estimator": "k1_in_reward"},
    {"ppo_clip": 0.2, "reference_kl": 0.3},
]


def near_policy(policy: PolicyModel, batch: TrainingBatch, noise: float = 0.3) -> TrainingBatch:
    """Sampler logprobs near the policy's own, some off by more: ratios on both sides of each bound."""
    generator = torch.Generator().manual_seed(9)
    members = []
    for member in batch.rollouts:
        rows = []
        for r in member.rows.rows:
            own = torch.tensor([0.0, *sequence_logprobs(policy, r.input_ids.tolist())])
            off = torch.randn(own.shape, generator=generator) * noise
            mu = torch.where(r.loss_mask, (own + off).clamp(max=-1e-3), torch.nan)
            rows.append(replace(r, sampler_logprobs=mu))
        members.append(replace(member, rows=replace(member.rows, rows=tuple(rows))))
    return TrainingBatch(members, batch.size, batch.tokens_per_rollout)


@pytest.fixture
def stock(policy: PolicyModel, tiny_folder: Path, tmp_path: Path) -> Any:
    save_adapter(policy, tmp_path, "tiny", None)
    return stock_model(tiny_folder, tmp_path)


@pytest.mark.parametrize("changes", OBJECTIVES, ids=str)
def test_gradient_is_that_of_the_formula(policy: PolicyModel, stock: Any, changes: dict[str, Any]) -> None:
    settings = with_objective(**changes)
    batch = near_policy(policy, random_batch(1))
    found, result = gradient(policy, batch, settings)
    assert result.outcome == "stepped"
    assert distance(found, slow_gradient(stock, batch, settings.objective)) < 1e-4


def test_formula_tests_see_both_sides_of_the_gate(policy: PolicyModel) -> None:
    batch = near_policy(policy, random_batch(1))
    _, result = gradient(policy, batch, with_objective(**OBJECTIVES[0]))
    assert 0 < len(result.gated_out) < len(batch.rollouts)


def test_gradient_at_another_temperature_is_that_of_the_formula(policy: PolicyModel, stock: Any) -> None:
    settings = with_objective(gate="none")
    batch = random_batch(2, temperature=0.7)
    found, _ = gradient(policy, batch, settings)
    assert distance(found, slow_gradient(stock, batch, settings.objective)) < 1e-4


@hypothesis_settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1000), budget=st.integers(16, 60), objective=st.sampled_from(OBJECTIVES))
def test_gradient_is_the_same_for_any_packing(
    policy: PolicyModel, seed: int, budget: int, objective: dict[str, Any]
) -> None:
    batch = near_policy(policy, random_batch(seed))
    whole = with_objective(**objective)
    packed = whole.model_copy(update={"sequences": with_sequences(token_budget=budget).sequences})
    expected, first = gradient(policy, batch, whole)
    found, second = gradient(policy, batch, packed)
    assert first.gated_out == second.gated_out
    assert first.metrics["n_micro_batches"] == 1
    if first.outcome == "stepped":
        assert distance(found, expected) < 1e-5


def test_gradient_is_the_same_padded_and_end_to_end(policy: PolicyModel) -> None:
    batch = random_batch(3)
    assert not policy.padded
    expected, _ = gradient(policy, batch, with_objective(gate="none"))
    policy.base.set_attn_implementation("sdpa")
    policy.padded = True
    found, _ = gradient(policy, batch, with_objective(gate="none"))
    assert distance(found, expected) < 1e-5


def test_gradient_is_the_same_with_recomputed_activations(policy: PolicyModel) -> None:
    batch = random_batch(3)
    expected, _ = gradient(policy, batch, with_objective(gate="none"))
    policy.kept_tokens = 0
    found, _ = gradient(policy, batch, with_objective(gate="none"))
    assert distance(found, expected) < 1e-6


def test_tokens_outside_the_loss_mask_have_no_gradient(policy: PolicyModel) -> None:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 259, (20,), generator=generator).tolist()
    mask = [5 <= t < 9 or 14 <= t < 17 for t in range(20)]
    states: list[torch.Tensor] = []
    handle = policy.base.base_model.register_forward_hook(
        lambda _module, _inputs, output: states.append(output.last_hidden_state) or states[-1].retain_grad()
    )
    gradient(
        policy, TrainingBatch([rollout(1, [row(ids, mask)], 1.0)], 1, 7.0), with_objective(reference_kl=0.0)
    )
    handle.remove()
    touched = states[0].grad[0].abs().sum(1) > 0
    assert touched.tolist() == [t + 1 < 20 and mask[t + 1] for t in range(20)]


def test_text_after_the_last_policy_token_changes_nothing(policy: PolicyModel) -> None:
    mask = [False] * 4 + [True] * 4 + [False] * 2
    found = [
        gradient(policy, TrainingBatch([rollout(1, [row(ids, mask)], 1.0)], 1, 4.0), with_objective())[0]
        for ids in ([*range(10, 18), 30, 31], [*range(10, 18), 90, 91])
    ]
    assert distance(*found) < 1e-6


def split_and_whole(generator: torch.Generator) -> tuple[list[Any], list[Any]]:
    """The same two calls as one row, and as two rows of which the second repeats the first as prompt."""
    whole = random_row(generator, 6, 20)
    first, second = [6 <= t < 11 for t in range(26)], [18 <= t < 26 for t in range(26)]
    whole = replace(whole, loss_mask=torch.tensor(first) | torch.tensor(second))
    parts = [
        replace(
            whole,
            input_ids=whole.input_ids[:end],
            loss_mask=torch.tensor(mask[:end]),
            sampler_logprobs=whole.sampler_logprobs[:end],
            temperature=whole.temperature[:end],
        )
        for mask, end in ((first, 12), (second, 26))
    ]
    return [whole], parts


@pytest.mark.parametrize("budget", [8192, 30, 16])
@pytest.mark.parametrize("gate", ["binary_kl", "none"])
def test_rollout_of_several_rows_equals_the_unsplit_one(policy: PolicyModel, budget: int, gate: str) -> None:
    whole, parts = split_and_whole(torch.Generator().manual_seed(6))
    other = random_batch(7, 2).rollouts
    settings = with_objective(gate=gate, gate_delta=0.15, aggregation="sequence_mean")
    settings = settings.model_copy(update={"sequences": with_sequences(token_budget=budget).sequences})
    batches = [
        near_policy(policy, TrainingBatch([rollout(9, rows, 0.8), *other], 3, 9.0), noise=0.0)
        for rows in (whole, parts)
    ]
    (expected, first), (found, second) = (gradient(policy, batch, settings) for batch in batches)
    assert first.outcome == second.outcome == "stepped"
    assert first.policy_tokens == second.policy_tokens
    assert distance(found, expected) < 1e-5


def said_in(rows: list[Any], *ends: int) -> list[Any]:
    """Rows whose policy tokens before `ends[0]` are of message 1, those before `ends[1]` of 3, and so on."""
    messages = torch.bucketize(torch.arange(26), torch.tensor(ends), right=True) * 2 + 1
    return [replace(r, messages=messages[: len(r.input_ids)]) for r in rows]


@pytest.mark.parametrize("changes", [{}, {"ppo_clip": 0.2}, {"weight_cap": None}], ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_gradient_of_two_graded_turns_is_the_sum_of_the_two_by_the_formula(
    policy: PolicyModel, stock: Any, split: bool, changes: dict[str, Any]
) -> None:
    """Each part alone: the tokens of one message, with the rollout's advantage and the turn's term."""
    settings = with_objective(gate="none", reference_kl=0.0, **changes)
    rows = said_in(split_and_whole(torch.Generator().manual_seed(6))[split], 12, 26)
    other = random_batch(7, 2).rollouts
    whole = near_policy(policy, TrainingBatch([rollout(9, rows, 0.2), *other], 3, 9.0))
    member = replace(whole.rollouts[0], turns={1: 0.5, 3: -0.9, 7: 100.0})
    found, result = gradient(policy, replace(whole, rollouts=[member, *whole.rollouts[1:]]), settings)
    assert result.metrics["turns/graded"] == 3
    assert result.metrics["turns/without_tokens"] == 1

    def part(message: int, advantage: float) -> Any:
        masked = [replace(r, loss_mask=r.loss_mask & (r.messages == message)) for r in member.rows.rows]
        return rollout(message, masked, advantage)

    alone = [[part(1, 0.2 + 0.5)], [part(3, 0.2 - 0.9)], list(whole.rollouts[1:])]
    parts = [slow_gradient(stock, TrainingBatch(each, 3, 9.0), settings.objective) for each in alone]
    summed = {name: sum((p[name] for p in parts[1:]), parts[0][name]) for name in parts[0]}
    assert distance(found, summed) < 1e-4
    assert distance(gradient(policy, whole, settings)[0], summed) > 0.1


@pytest.mark.parametrize("budget", [8192, 30, 16])
def test_turns_reach_the_same_tokens_in_any_packing(policy: PolicyModel, budget: int) -> None:
    settings = with_objective(gate="none").model_copy(
        update={"sequences": with_sequences(token_budget=budget).sequences}
    )
    found = []
    for rows in split_and_whole(torch.Generator().manual_seed(6)):
        member = replace(rollout(9, said_in(rows, 12, 26), 0.2), turns={1: 0.5, 3: -0.9})
        found.append(
            gradient(policy, TrainingBatch([member, *random_batch(7, 2).rollouts], 3, 9.0), settings)
        )
    assert found[0][1].outcome == found[1][1].outcome == "stepped"
    assert distance(found[0][0], found[1][0]) < 1e-5


def test_gate_sees_all_rows_of_a_rollout(policy: PolicyModel) -> None:
    """One wild row rejects the rollout even when its rows do not fit into one micro-batch."""
    _, parts = split_and_whole(torch.Generator().manual_seed(6))
    batch = near_policy(
        policy, TrainingBatch([rollout(9, parts, 0.8), *random_batch(7, 1).rollouts], 2, 9.0), 0.0
    )
    wild = replace(parts[1], sampler_logprobs=torch.where(parts[1].loss_mask, -1e-4, torch.nan))
    calm = batch.rollouts[0].rows.rows[0]
    member = replace(batch.rollouts[0], rows=replace(batch.rollouts[0].rows, rows=(calm, wild)))
    batch = TrainingBatch([member, batch.rollouts[1]], 2, 9.0)
    for budget in (8192, 16):
        settings = with_objective().model_copy(
            update={"sequences": with_sequences(token_budget=budget).sequences}
        )
        assert gradient(policy, batch, settings)[1].gated_out == (9,)


def test_rejecting_a_rollout_leaves_the_others_gradients_unchanged(policy: PolicyModel) -> None:
    batch = near_policy(policy, random_batch(1), noise=0.0)
    wild = batch.rollouts[2]
    r = wild.rows.rows[0]
    r = replace(r, sampler_logprobs=torch.where(r.loss_mask, -1e-3, torch.nan))
    wild = replace(wild, rows=replace(wild.rows, rows=(r,)))
    members = [*batch.rollouts[:2], wild, *batch.rollouts[3:]]
    found, result = gradient(policy, TrainingBatch(members, 6, 10.0), with_objective())
    assert result.gated_out == (wild.rollout_id,)
    without = [m for m in members if m is not wild]
    expected, _ = gradient(policy, TrainingBatch(without, 6, 10.0), with_objective())
    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -1e4, 0.0])
@pytest.mark.parametrize("changes", OBJECTIVES, ids=str)
def test_wild_sampler_logprobs_leave_the_gradient_finite(
    policy: PolicyModel, value: float, changes: dict[str, Any]
) -> None:
    ids = list(range(20, 32))
    mask = [False] * 6 + [True] * 6
    inside = row(ids, mask, [value, -1.0, -1.0, -1.0, -1.0, -1.0])
    outside = row(ids, mask, [-1.0] * 6)
    outside.sampler_logprobs[2] = value
    batch = TrainingBatch([rollout(1, [inside], 0.5), rollout(2, [outside], -0.5)], 2, 6.0)
    settings = with_objective(**{**changes, "gate_delta": 1e9})
    found, result = gradient(policy, batch, settings)
    assert result.outcome == "stepped"
    assert all(g.isfinite().all() for g in found.values())


def test_missing_sampler_logprobs_are_recomputed_under_the_stamped_version(
    policy: PolicyModel, tiny_folder: Path, tmp_path: Path
) -> None:
    folders = {1: tmp_path / "v1", 2: tmp_path / "v2"}
    for version, folder in folders.items():
        shake(policy, seed=version, size=0.02 * version)
        folder.mkdir()
        save_adapter(policy, folder, "tiny", None)
    load_adapter(policy, folders[2])
    stock = {version: stock_model(tiny_folder, folder) for version, folder in folders.items()}
    unknown = [rollout_without_logprobs(m, version=n % 3) for n, m in enumerate(random_batch(8).rollouts)]
    batch = TrainingBatch(unknown, 6, 10.0)
    asked: list[int] = []

    def load_version(version: int) -> Path | None:
        asked.append(version)
        return folders.get(version)

    def sampler(version: int, r: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            if version:
                return row_logprobs(stock[version], r)
            with stock[1].disable_adapter():
                return row_logprobs(stock[1], r)

    settings = with_objective(gate="none", reference_kl=0.1)
    found, _ = gradient(policy, batch, settings, load_version=load_version)
    assert sorted(asked) == [0, 1]
    expected = slow_gradient(stock[2], batch, settings.objective, sampler)
    assert distance(found, expected) < 1e-4
    assert (
        distance(
            gradient(policy, batch, with_objective(gate="none", reference_kl=0.0), load_version=folders.get)[
                0
            ],
            slow_gradient(stock[2], batch, with_objective(gate="none", reference_kl=0.0).objective, sampler),
        )
        < 1e-4
    )


def rollout_without_logprobs(member: Any, version: int) -> Any:
    rows = [
        replace(r, sampler_logprobs=torch.full_like(r.sampler_logprobs, torch.nan)) for r in member.rows.rows
    ]
    return rollout(member.rollout_id, rows, member.advantage, version=version, head=version == 2)


def test_bf16_gradient_points_where_the_fp32_gradient_does(
    policy: PolicyModel, tiny_source: Any, settings: PolicySettings, tmp_path: Path
) -> None:
    save_adapter(policy, tmp_path, "tiny", None)
    half = settings.model_copy(update={"sequences": with_sequences(precision="bf16").sequences})
    rounded = load_policy(tiny_source, half, device="cpu")
    load_adapter(rounded, tmp_path)
    batch = random_batch(3)
    expected, _ = gradient(policy, batch, with_objective(gate="none"))
    found, _ = gradient(rounded, batch, with_objective(gate="none"))
    assert {g.dtype for g in found.values()} == {torch.float32}
    left = torch.cat([found[name].flatten() for name in sorted(found)])
    right = torch.cat([expected[name].flatten() for name in sorted(found)])
    assert torch.cosine_similarity(left, right, dim=0) > 0.99


def batch_that_begins_alike() -> TrainingBatch:
    """Five rollouts after one prompt of 16 tokens, one of them in two rows, and one of another agent."""
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(3, 259, (16,), generator=generator).tolist()

    def after(*tail: int) -> Any:
        ids = [*prompt, *torch.randint(3, 259, (sum(tail),), generator=generator).tolist()]
        sampled = [False] * (len(prompt) + sum(tail[:-1])) + [True] * tail[-1]
        return row(ids, sampled, (-torch.rand(tail[-1], generator=generator) * 3 - 0.1).tolist())

    members = [rollout(n, [after(n, 5)], 0.6 - 0.3 * n) for n in range(4)]
    members.append(rollout(8, [after(3), after(3, 4, 6)], 0.5))
    members.append(rollout(9, [random_row(generator, 12, 5)], -0.7))
    return TrainingBatch(members, 6, 8.0)


@pytest.mark.parametrize("budget", [8192, 60, 30, 16])
def test_prefix_that_is_computed_once_gives_the_gradient_of_the_formula(
    policy: PolicyModel, stock: Any, budget: int
) -> None:
    settings = with_objective(gate="none", reference_kl=0.2)
    settings = settings.model_copy(update={"sequences": with_sequences(token_budget=budget).sequences})
    sizes: list[int] = []
    policy.base.base_model.register_forward_pre_hook(
        lambda _module, _inputs, options: sizes.append(options["input_ids"].numel()), with_kwargs=True
    )
    batch = batch_that_begins_alike()
    found, _ = gradient(policy, batch, settings)
    assert distance(found, slow_gradient(stock, batch, settings.objective)) < 1e-4
    lengths = sum(len(r.input_ids) for m in batch.rollouts for r in m.rows.rows)
    if budget > 30:
        assert sum(sizes) < 2 * lengths  # with the reference pass
