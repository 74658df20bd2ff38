"""The objective written from its formula, token by token, over a stock model in double precision.

Shares no code with `trainer`: stock PEFT over stock transformers with eager attention, the whole
softmax of every position, Python loops.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from service.policies import Objective
from trainer.sequences import Row
from trainer.step import TrainingBatch

Logprobs = list[torch.Tensor]


def stock_model(base: Path, adapter: Path) -> PeftModel:
    """The policy as anyone else would load it."""
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return PeftModel.from_pretrained(model, adapter, is_trainable=True).double()


def row_logprobs(model: PeftModel, row: Row) -> Logprobs:
    """log p of each policy token, one by one."""
    logits = model(input_ids=row.input_ids[None]).logits[0]
    found = []
    for place in row.loss_mask.nonzero().flatten().tolist():
        scores = logits[place - 1] / row.temperature[place].double()
        found.append(scores[row.input_ids[place]] - scores.exp().sum().log())
    return found


def slow_gradient(
    model: PeftModel,
    batch: TrainingBatch,
    settings: Objective,
    sampler: Callable[[int, Row], Logprobs] | None = None,
) -> dict[str, torch.Tensor]:
    """Gradient of the batch by parameter name as saved; `sampler(version, row)` fills unknown mu."""
    loss = slow_loss(model, batch, settings, sampler)
    model.zero_grad()
    loss.backward()
    return {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def slow_loss(
    model: PeftModel,
    batch: TrainingBatch,
    settings: Objective,
    sampler: Callable[[int, Row], Logprobs] | None,
) -> torch.Tensor:
    """Sum over rollouts and tokens, every denominator spelled out."""
    current, mus, references = [], [], []
    for member in batch.rollouts:
        own: Logprobs = []
        mu: list[float] = []
        reference: list[float] = []
        for row, version in zip(member.rows.rows, member.rows.versions, strict=True):
            found = row_logprobs(model, row)
            own += found
            known = row.sampler_logprobs[row.loss_mask].tolist()
            fill = sampler(version, row) if sampler and not member.version_is_head else found
            mu += [f.item() if math.isnan(k) else k for k, f in zip(known, fill, strict=True)]
            with torch.no_grad(), model.disable_adapter():
                reference += [x.item() for x in row_logprobs(model, row)]
        current.append(own)
        mus.append(mu)
        references.append(reference)
    total_tokens = sum(len(own) for own in current)
    loss = torch.zeros((), dtype=torch.float64)
    for i, member in enumerate(batch.rollouts):
        tokens = len(current[i])
        weight = {
            "token_level": 1 / (batch.size * batch.tokens_per_rollout),
            "sequence_mean": 1 / (batch.size * tokens),
            "token_mean": 1 / total_tokens,
        }[settings.aggregation]
        if rejected(current[i], mus[i], settings):
            continue
        for t in range(tokens):
            logprob, mu, reference = current[i][t], mus[i][t], references[i][t]
            advantage = member.advantage
            if settings.reference_kl_estimator == "k1_in_reward":
                advantage += settings.reference_kl * k1_share(current, references, i, t)
            loss = loss + weight * token_loss(logprob, mu, reference, advantage, settings)
    return loss


def rejected(current: Logprobs, mus: list[float], settings: Objective) -> bool:
    if settings.gate == "none" or settings.ppo_clip is not None:
        return False
    total = 0.0
    for logprob, mu in zip(current, mus, strict=True):
        p = min(max(math.exp(mu), 1e-6), 1 - 1e-6)
        q = min(max(math.exp(logprob.item()), 1e-6), 1 - 1e-6)
        total += p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return total / len(mus) > settings.gate_delta


def token_loss(
    logprob: torch.Tensor, mu: float, reference: float, advantage: float, settings: Objective
) -> torch.Tensor:
    ratio = math.exp(min(max(logprob.item() - mu, -20.0), 20.0))
    if settings.ppo_clip is None:
        weight = ratio if settings.weight_cap is None else min(ratio, settings.weight_cap)
        loss = -advantage * weight * logprob
    else:
        low, high = 1 - settings.ppo_clip, 1 + settings.ppo_clip
        weight = min(ratio, high)
        # r A where that is the smaller, else a constant.
        inside = ratio * advantage <= min(max(ratio, low), high) * advantage
        loss = -advantage * ratio * logprob if inside else 0 * logprob
    x = logprob - reference
    if settings.reference_kl_estimator == "k2":
        loss = loss + settings.reference_kl * weight * x * x / 2
    elif settings.reference_kl_estimator == "k3":
        loss = loss + settings.reference_kl * weight * (torch.exp(-x) - 1 + x)
    return loss


def k1_share(current: list[Logprobs], references: list[list[float]], i: int, t: int) -> float:
    others = [
        current[j][s].item() - references[j][s]
        for j in range(len(current))
        if j != i
        for s in range(len(current[j]))
    ]
    return sum(others) / len(others) - (current[i][t].item() - references[i][t])
