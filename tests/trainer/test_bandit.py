"""A policy of two actions over easy and hard tasks, one rollout a task: the baseline is what decides.

reference/algorithms.md §7.4, test 15.
"""

import hashlib

import numpy as np
import torch

from service.baselines.estimators import Scored, make_estimator
from service.baselines.features import Task, TaskFeatures
from service.policies import Objective
from trainer import objective
from trainer.objective import Tokens

BATCH, POLICIES = 32, 200
EASY, HARD, GAIN = 0.8, 0.05, 0.1
OBJECTIVE = Objective(reference_kl=0.0)


def task(number: int) -> Task:
    """Even numbers are easy, odd ones hard, and their words say which."""
    words = "refund the order of customer" if number % 2 == 0 else "prove the theorem of chapter"
    digest = hashlib.sha256(str(number).encode()).digest()
    features = TaskFeatures(f"{words} {number}", len(words), {})
    return Task(features, np.zeros(1, np.float32), str(number), None, digest, digest, frozenset(), 0)


def weights(estimator: str) -> torch.Tensor:
    """What the baselines of one batch weigh the others' rewards with, [B, B]; its diagonal is zero."""
    batch = Scored([task(number) for number in range(BATCH)], np.zeros(BATCH))
    made = make_estimator(estimator).predict(batch, Scored([], np.zeros(0)))
    return torch.tensor(made.weights, dtype=torch.float32)


def share_of_the_better_action(estimator: str, rate: float, steps: int) -> torch.Tensor:
    """Its probability after training, for each of many policies that start undecided, [POLICIES]."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.zeros(POLICIES, 2, requires_grad=True)
    chances = torch.tensor([EASY, HARD]).repeat(BATCH // 2)
    mixing = weights(estimator)
    for _ in range(steps):
        logprobs = logits.log_softmax(1)
        better = torch.rand(POLICIES, BATCH, generator=generator) < logprobs[:, 1:].detach().exp()
        rewards = (torch.rand(POLICIES, BATCH, generator=generator) < chances + GAIN * better).float()
        advantages = rewards - rewards @ mixing.T
        taken = torch.where(better, logprobs[:, 1:], logprobs[:, :1]).flatten()
        count = len(taken)
        tokens = Tokens(
            taken, taken.detach(), None, torch.arange(count), advantages.flatten(),
            torch.full((count,), 1 / BATCH),
        )  # fmt: skip
        (slope,) = torch.autograd.grad(objective.loss(tokens, OBJECTIVE).total, logits)
        with torch.no_grad():
            logits -= rate * slope
    return logits.softmax(1)[:, 1].detach()


def test_one_rollout_a_task_finds_the_better_action_with_a_kernel_baseline() -> None:
    assert share_of_the_better_action("tfidf_softmax", 2.0, 150).median() > 0.95


def test_at_a_raised_rate_the_batch_mean_ends_at_the_wrong_action_more_often() -> None:
    kernel = share_of_the_better_action("tfidf_softmax", 60.0, 30)
    mean = share_of_the_better_action("leave_one_out", 60.0, 30)
    wrong = [float((share < 0.5).float().mean()) for share in (kernel, mean)]
    assert wrong[1] > 2 * wrong[0]
    assert wrong[1] - wrong[0] > 0.05
