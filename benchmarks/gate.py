"""`python -m benchmarks.gate`: whom the binary-KL gate rejects when rollouts are stale, on a toy policy.

A softmax over 8 answers to 32 tasks that share features, one right answer each, one answer a rollout,
batches of 32, Adam, the objective of trainer/objective.py; `stale` rollouts were sampled so many steps
ago. Rewards 0 or 1, the baseline is the task's true mean. No language model: it shows a mechanism, its
rates are not those of a LoRA.
"""

import argparse
import sys
from dataclasses import dataclass

import torch

from benchmarks.report import Report
from service.policies import Objective
from trainer import objective
from trainer.objective import Tokens

TASKS, FEATURES, ANSWERS, STEPS = 32, 16, 8, 60
RATES = (0.05, 0.2, 0.5)


@dataclass(slots=True)
class Counted:
    """Rollouts, and those rejected, by the sign of their advantage: earned more, or less, than expected."""

    seen: torch.Tensor
    rejected: torch.Tensor

    def share(self, sign: int) -> float:
        """The share rejected of one sign (0: less, 1: more)."""
        return float(self.rejected[sign] / self.seen[sign].clamp(min=1))


def train(runs: int, rate: float, stale: int, gate_delta: float | None, seed: int) -> tuple[Counted, float]:
    """Train `runs` policies at once; return whom the gate rejected, and the mean reward at the end."""
    torch.manual_seed(seed)
    use = Objective(
        gate="none" if gate_delta is None else "binary_kl", gate_delta=gate_delta or 1.0, reference_kl=0
    )
    features = torch.randn(runs, TASKS, FEATURES) / FEATURES**0.5
    right = torch.randint(ANSWERS, (runs, TASKS, 1))
    weights = torch.zeros(runs, FEATURES, ANSWERS, requires_grad=True)
    adam = torch.optim.Adam([weights], lr=rate, betas=(0.9, 0.95))
    past = [weights.detach().clone()]
    counted = Counted(torch.zeros(2), torch.zeros(2))
    for _ in range(STEPS):
        sampler = (features @ past[max(0, len(past) - 1 - stale)]).log_softmax(2)
        answers = torch.multinomial(sampler.exp().flatten(0, 1), 1).view(runs, TASKS, 1)
        expected = sampler.exp().gather(2, right)
        advantages = ((answers == right).float() - expected).flatten()
        current = (features @ weights).log_softmax(2).gather(2, answers).flatten()
        count = len(current)
        tokens = Tokens(
            current, sampler.gather(2, answers).flatten(), None, torch.arange(count), advantages,
            torch.full((count,), 1 / TASKS),
        )  # fmt: skip
        loss = objective.loss(tokens, use)
        for sign, of in enumerate((advantages < 0, advantages >= 0)):
            counted.seen[sign] += of.sum()
            counted.rejected[sign] += (of & ~loss.kept).sum()
        adam.zero_grad()
        torch.autograd.backward(loss.total)
        adam.step()
        past.append(weights.detach().clone())
    final = (features @ weights.detach()).softmax(2).gather(2, right)
    return counted, float(final.mean())


def main() -> None:
    """Measure, print, write benchmarks/results/gate.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="policies of each kind")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    report = Report("gate", " ".join(["python -m benchmarks.gate", *sys.argv[1:]]))
    for rate in RATES:
        for stale in (0, 1, 2):
            for delta in (3e-3, 3e-2, None):
                counted, reward = train(wanted.runs, rate, stale, delta, wanted.seed)
                case = f"rate {rate:g}, stale {stale}, gate {'none' if delta is None else f'{delta:g}'}"
                if delta is not None and stale:
                    report.add(f"{case}: rejected that earned more", 100 * counted.share(1), "%")
                    report.add(f"{case}: rejected that earned less", 100 * counted.share(0), "%")
                report.add(f"{case}: reward after {STEPS} steps", reward, "")
    report.write()


if __name__ == "__main__":
    main()
