"""Figures about one step (names as reference/algorithms.md §4.2).

Knows no model. Pure. Taken over all policy tokens, before the gate and with untruncated ratios, so
that a rejected rollout is seen.
"""

from collections.abc import Mapping, Sequence

import torch

from service.policies import Objective
from trainer.objective import Tokens, log_ratio


def rollout_metrics(rewards: Sequence[float], advantages: Sequence[float]) -> dict[str, float]:
    """Rewards, baselines (reward minus advantage) and advantages of the batch."""
    r = torch.tensor(rewards, dtype=torch.float64)
    a = torch.tensor(advantages, dtype=torch.float64)
    return {
        "reward/mean": r.mean().item(),
        "reward/std": r.std(correction=0).item(),
        "reward/min": r.min().item(),
        "reward/max": r.max().item(),
        "baseline/mean": (r - a).mean().item(),
        "baseline/std": (r - a).std(correction=0).item(),
        "adv/mean": a.mean().item(),
        "adv/absmean": a.abs().mean().item(),
        "adv/std": a.std(correction=0).item(),
        "adv/frac_zero": (a.abs() < 1e-9).double().mean().item(),
    }


def turn_metrics(members: Sequence[tuple[Mapping[int, float], Sequence[int]]]) -> dict[str, float]:
    """Of members with turns: their terms by message, and their tokens' messages. Nothing without any.

    `turns/without_tokens` counts terms that reach no token, such as those of a message that was cut off.
    """
    terms = [
        (abs(term), turn in set(messages)) for turns, messages in members for turn, term in turns.items()
    ]
    if not terms:
        return {}
    return {
        "turns/graded": float(len(terms)),
        "turns/without_tokens": float(sum(not reached for _, reached in terms)),
        "turns/absmean": sum(term for term, _ in terms) / len(terms),
    }


def token_metrics(tokens: Tokens, entropy: torch.Tensor, settings: Objective) -> dict[str, float]:
    """Divergence from sampler and reference, importance ratios and entropy; `tokens` detached.

    kl_sample_train_v1 = mean(mu - l), _v2 = mean((mu - l)^2) / 2, over tokens whose sampler
    logprob is known (tinker-cookbook, rl/metrics.py). is/ess = (sum rho)^2 / (M sum rho^2).
    """
    ratios = log_ratio(tokens.logprobs, tokens.sampler_logprobs).double()
    known = ratios[tokens.sampler_logprobs.isfinite()]
    rho = ratios.exp()
    cap = settings.weight_cap or float("inf")
    metrics = {
        "kl_sample_train_v1": -known.mean().item() if len(known) else 0.0,
        "kl_sample_train_v2": known.square().mean().item() / 2 if len(known) else 0.0,
        "is/mean": rho.mean().item(),
        "is/min": rho.min().item(),
        "is/max": rho.max().item(),
        "is/ess": (rho.sum().square() / (len(rho) * rho.square().sum())).item(),
        "is/trunc_frac": (rho > cap).double().mean().item(),
        "is/known_frac": len(known) / len(rho),
        "entropy": entropy.double().mean().item(),
    }
    if tokens.reference_logprobs is not None:
        metrics["kl_ref"] = (tokens.logprobs - tokens.reference_logprobs).double().mean().item()
    return metrics


def adapter_norm(parameters: Mapping[str, torch.Tensor], scale: float) -> float:
    """Frobenius norm of all weight changes together: sqrt(sum |scale B A|^2).

    |B A|^2 = trace((B^T B)(A A^T)): rank-sized matrices only.
    """
    total = 0.0
    for name, a in parameters.items():
        if ".lora_A." in name:
            b = parameters[name.replace(".lora_A.", ".lora_B.")]
            total += ((b.T @ b) * (a @ a.T)).sum().item()
    return float(scale * max(total, 0.0) ** 0.5)
