"""Seeded rows, rollouts and batches, and the gradient that a batch makes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from service.policies import PolicySettings
from trainer.optimizer import AdapterOptimizer
from trainer.policy import PolicyModel
from trainer.sequences import RolloutRows, Row
from trainer.step import StepResult, TrainingBatch, TrainingRollout, train_batch

TINY = PolicySettings.model_validate(
    {
        "base_model": "tiny",
        "adapter": {"rank": 4, "alpha": 8},
        "sequences": {"precision": "fp32", "max_tokens": 256},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
    }
)


def with_objective(**changes: Any) -> PolicySettings:
    """The tiny settings with another objective."""
    objective = TINY.objective.model_copy(update=changes)
    return TINY.model_copy(update={"objective": objective})


def with_sequences(**changes: Any) -> PolicySettings:
    """The tiny settings with other limits."""
    return TINY.model_copy(update={"sequences": TINY.sequences.model_copy(update=changes)})


def shake(policy: PolicyModel, seed: int = 5, size: float = 0.05) -> None:
    """Give the adapter's B values, so that A has a gradient and the policy is not the base."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def row(
    ids: Sequence[int],
    mask: Sequence[bool],
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> Row:
    """A row; `logprobs` of its masked tokens, None: unknown."""
    sampler = torch.full((len(ids),), torch.nan)
    chosen = torch.tensor(mask)
    if logprobs is not None:
        sampler[chosen] = torch.tensor(logprobs)
    return Row(torch.tensor(ids), chosen, sampler, torch.where(chosen, temperature, 1.0))


def random_row(generator: torch.Generator, prompt: int, completion: int, temperature: float = 1.0) -> Row:
    """Random bytes, the last `completion` of them sampled with plausible logprobs."""
    ids = torch.randint(3, 259, (prompt + completion,), generator=generator).tolist()
    logprobs = (-torch.rand(completion, generator=generator) * 6 - 0.1).tolist()
    return row(ids, [False] * prompt + [True] * completion, logprobs, temperature)


def rollout(
    number: int, rows: Sequence[Row], advantage: float, *, version: int = 0, head: bool = True
) -> TrainingRollout:
    """A trainable rollout of the given rows."""
    tokens = sum(int(r.loss_mask.sum()) for r in rows)
    verdict = RolloutRows(tuple(rows), "exact", "", (), tokens, (version,) * len(rows))
    return TrainingRollout(number, verdict, advantage, 0.5 + advantage / 2, head)


def random_batch(seed: int, count: int = 6, *, temperature: float = 1.0) -> TrainingBatch:
    """Rollouts of 3 to 40 tokens with advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    members = []
    for number in range(count):
        prompt, completion = torch.randint(2, 20, (2,), generator=generator).tolist()
        advantage = float(torch.rand(1, generator=generator)) - 0.4
        members.append(rollout(number, [random_row(generator, prompt, completion, temperature)], advantage))
    return TrainingBatch(members, count, 10.0)


class Recorder(AdapterOptimizer):
    """Keeps the gradient it is asked to step with, before clipping."""

    def __init__(self, policy: PolicyModel, settings: PolicySettings) -> None:
        super().__init__(policy.parameters(), settings.optimizer)
        self.gradient: dict[str, torch.Tensor] = {}

    def step(self, step_number: int) -> float:
        self.gradient = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        return super().step(step_number)


def gradient(
    policy: PolicyModel, batch: TrainingBatch, settings: PolicySettings, **options: Any
) -> tuple[dict[str, torch.Tensor], StepResult]:
    """The gradient of one step, whose effect on the adapter is undone."""
    before = {name: p.detach().clone() for name, p in policy.parameters().items()}
    recorder = Recorder(policy, settings)
    options = {"step_number": 1, "load_version": lambda _: None} | options
    result = train_batch(policy, recorder, batch, settings, **options)
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            parameter.copy_(before[name])
    return recorder.gradient, result


def distance(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """Relative distance of two gradients, as single vectors."""
    assert set(a) == set(b)
    left = torch.cat([a[name].flatten().double() for name in sorted(a)])
    right = torch.cat([b[name].flatten().double() for name in sorted(a)])
    return float((left - right).norm() / right.norm())
