"""The objective: FlashREINFORCE's, with every switch of `service.policies.Objective`.

Knows no model and no micro-batch. Pure functions of tensors over policy tokens, all summed, never
averaged: denominators come in as weights fixed beforehand, so that no packing changes the gradient.
Invariants: unknown sampler logprobs (NaN, infinite) are replaced before any exp, so that no NaN
exists even in a branch that is not taken (prime-rl issue 2084, Soup issue 342); log-ratios are
clamped to +-20.

    loss = - sum_i m_i A_i sum_t w_i sg(rho_it) l_it  +  beta sum_i m_i sum_t w_i sg(rho_it) k2_it

l: log-probability under the policy; mu: under the sampler; rho = min(exp(l - mu), c); m: gate;
w: weight of rollout i's tokens. FlashREINFORCE (yifanzhang-pro/FlashREINFORCE, loss.py) has
w = 1/(B T_i), no cap and no beta.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from service.policies import Objective

LOG_RATIO_LIMIT = 20.0
_SMALLEST_PROBABILITY = 1e-6


@dataclass(frozen=True, slots=True)
class Tokens:
    """Policy tokens of some whole rollouts, [M] each.

    `logprobs` may carry a gradient; `sampler_logprobs` NaN: not known; `reference_logprobs` None:
    no reference; `owner` is each token's rollout, 0..k-1; `advantages` and `weights` per token.
    """

    logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None
    owner: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """Sums over the tokens; `kept` [k] says which rollouts passed the gate."""

    policy: torch.Tensor
    reference: torch.Tensor
    kept: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """What backward is called on."""
        return self.policy + self.reference


def token_weights(
    aggregation: Literal["token_level", "sequence_mean", "token_mean"],
    policy_tokens: Sequence[int],
    size: int,
    tokens_per_rollout: float,
) -> list[float]:
    """Weight of each token of rollout i, from T_i = `policy_tokens[i]`, B = `size`, and L.

    token_level 1/(B L); sequence_mean 1/(B T_i); token_mean 1/sum T. sequence_mean depends on the
    action through T_i, so that a baseline biases it; token_mean's bias is O(1/B).
    """
    if aggregation == "token_level":
        return [1 / (size * tokens_per_rollout)] * len(policy_tokens)
    if aggregation == "sequence_mean":
        return [1 / (size * tokens) for tokens in policy_tokens]
    return [1 / sum(policy_tokens)] * len(policy_tokens)


def log_ratio(logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> torch.Tensor:
    """l - mu within +-20, 0 where mu is not known (ratio 1), with the gradient of l throughout.

    Beyond the clamp the gradient is 0.
    """
    known = sampler_logprobs.isfinite()
    mu = torch.where(known, sampler_logprobs, logprobs.detach())
    return (logprobs - mu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def binary_kl(logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> torch.Tensor:
    """Divergence of the sampled action's Bernoulli, mu to l, per token; 0 where mu is not known.

    p log(p/q) + (1-p) log((1-p)/(1-q)) with p = exp(mu), q = exp(l), both in [1e-6, 1 - 1e-6]
    (FlashREINFORCE). A lower bound of the full divergence.
    """
    logprobs = logprobs.detach().double()
    known = sampler_logprobs.isfinite()
    low, high = _SMALLEST_PROBABILITY, 1 - _SMALLEST_PROBABILITY
    q = logprobs.exp().clamp(low, high)
    p = torch.where(known, sampler_logprobs.double(), logprobs).exp().clamp(low, high)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def divergences(tokens: Tokens) -> torch.Tensor:
    """Mean binary divergence of each rollout over all its policy tokens, [k] fp64."""
    per_token = binary_kl(tokens.logprobs, tokens.sampler_logprobs)
    counts = torch.bincount(tokens.owner)
    sums = torch.zeros(len(counts), dtype=per_token.dtype, device=per_token.device)
    return sums.index_add_(0, tokens.owner, per_token) / counts.clamp(min=1)


def gate(tokens: Tokens, settings: Objective) -> torch.Tensor:
    """Which rollouts are kept, [k] bool; those rejected stay in every denominator."""
    if settings.ppo_clip is not None or settings.gate == "none":
        count = int(tokens.owner.max()) + 1
        return torch.ones(count, dtype=torch.bool, device=tokens.owner.device)
    return divergences(tokens) <= settings.gate_delta


def importance_weights(tokens: Tokens, settings: Objective) -> torch.Tensor:
    """Detached rho, truncated at the cap; under `ppo_clip` at 1 + epsilon, for the KL alone."""
    ratio = log_ratio(tokens.logprobs.detach(), tokens.sampler_logprobs).exp()
    cap = settings.weight_cap if settings.ppo_clip is None else 1 + settings.ppo_clip
    return ratio if cap is None else ratio.clamp(max=cap)


def loss(tokens: Tokens, settings: Objective, kept: torch.Tensor | None = None) -> Loss:
    """The objective over whole rollouts; `kept` when the gate has been decided beforehand.

    A rejected rollout contributes neither its policy term nor its KL: the importance weights that
    both rest on are what the gate mistrusts.
    """
    kept = gate(tokens, settings) if kept is None else kept
    weights = torch.where(kept[tokens.owner], tokens.weights, 0.0)
    policy = (weights * _policy_terms(tokens, settings)).sum()
    reference = (weights * _reference_terms(tokens, settings)).sum()
    return Loss(policy, settings.reference_kl * reference, kept)


def _policy_terms(tokens: Tokens, settings: Objective) -> torch.Tensor:
    """-A sg(rho) l, or PPO's -min(r A, clip(r, 1 - eps, 1 + eps) A) with r = exp(l - mu)."""
    if settings.ppo_clip is None:
        return -tokens.advantages * importance_weights(tokens, settings) * tokens.logprobs
    ratio = log_ratio(tokens.logprobs, tokens.sampler_logprobs).exp()
    clipped = ratio.clamp(1 - settings.ppo_clip, 1 + settings.ppo_clip)
    return -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)


def _reference_terms(tokens: Tokens, settings: Objective) -> torch.Tensor:
    """KL to the reference, x = l - l_ref within +-20, weighted by rho (as TRL and NeMo).

    k2 = x^2 / 2 has the gradient of KL(policy || reference); k3 = exp(-x) - 1 + x on-policy has
    that of KL(reference || policy). k1_in_reward acts through the advantages.
    """
    if tokens.reference_logprobs is None or settings.reference_kl_estimator == "k1_in_reward":
        return torch.zeros_like(tokens.logprobs)
    x = (tokens.logprobs - tokens.reference_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value = 0.5 * x.square() if settings.reference_kl_estimator == "k2" else (-x).exp() - 1 + x
    return importance_weights(tokens, settings) * value


def k1_advantages(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, owner: torch.Tensor, beta: float
) -> torch.Tensor:
    """What k1_in_reward adds to each token's advantage: beta (mean of x over other rollouts - x_t).

    Over the whole batch, [M]. Detached. Centred apart from the reward's baseline, and without the
    rollout itself, so that the centring adds no bias; immediate, without the sum of later tokens,
    so that its expectation is k2's gradient (after tinker-cookbook, rl/metrics.py, which centres
    on the mean of all tokens). A batch of one rollout is not centred.
    """
    x = (logprobs - reference_logprobs).detach().double()
    counts = torch.bincount(owner)
    sums = torch.zeros(len(counts), dtype=x.dtype, device=x.device).index_add_(0, owner, x)
    others = (sums.sum() - sums) / (counts.sum() - counts).clamp(min=1)
    return (beta * (others[owner] - x)).float()
