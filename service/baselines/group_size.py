"""Rollouts per task under a fixed budget: when one rollout a task beats a group.

Source: the question is "You Only Rollout Once", App. C; the derivation below is *ours*, and κ is
defined here. Knows neither the optimizer nor what a rollout costs.

With N rollouts, G to a task, a mean-of-others baseline within the group, and the second moment of
the score independent of the advantage (the post's Assumption 3), the variance of the gradient is,
in units of σ²_ε E‖∇ ln π‖² / N,

    G = 1, baseline with MSE(b) = ρ σ²_ε:      1 + ρ + κ
    G > 1:                                     1 + 1/(G−1) + G κ

where κ is the variance of the mean gradient between tasks over that within a task: G rollouts of
one task say G times less about how tasks differ. So G = 1 wins where ρ < 1/(G−1) + (G−1) κ.
"""

from __future__ import annotations


def gradient_variance(group_size: int, *, rho: float, kappa: float) -> float:
    """Variance at a fixed budget, in units of σ²_ε E‖∇ ln π‖² / N."""
    if group_size < 1:
        raise ValueError("a group has at least one rollout")
    waste = rho if group_size == 1 else 1.0 / (group_size - 1)
    return 1.0 + waste + group_size * kappa


def break_even_rho(group_size: int, *, kappa: float) -> float:
    """The ρ below which one rollout a task has less variance than groups of this size."""
    return 1.0 / (group_size - 1) + (group_size - 1) * kappa
