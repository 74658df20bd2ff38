"""One optimizer step on one batch.

Knows no database, lease or store. Invariants: weights of tokens are fixed before the first
micro-batch; an outcome other than `stepped` leaves adapter and optimizer bit-identical; same
inputs, threads and budget, same bits.

    rows ─> plan ─> no-grad pass (reference, missing sampler logprobs)
         ─> per micro-batch: forward, gate, backward ─> clip, step
"""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from service.errors import TrainingFailed
from service.policies import PolicySettings
from trainer import metrics, objective
from trainer.gradient import Member, Passed, accumulate, concatenated, owners
from trainer.optimizer import AdapterOptimizer
from trainer.packing import micro_batches
from trainer.policy import PolicyModel
from trainer.ranks import ALONE, Ranks
from trainer.scoring import Scores, logprobs_of, missing_versions, score
from trainer.sequences import RolloutRows
from trainer.sharding import run_along

Outcome = Literal["stepped", "all_gated_out", "none_trainable", "no_signal"]
NO_SIGNAL = 1e-9


@dataclass(frozen=True, slots=True)
class TrainingRollout:
    """A member of the batch. `version_is_head`: all of it was sampled by the adapter being trained.

    `turns` is what the tokens of a message have beside the rollout's advantage, by the message's index.
    """

    rollout_id: int
    rows: RolloutRows
    advantage: float
    reward: float
    version_is_head: bool
    turns: Mapping[int, float] = field(default_factory=dict)

    def advantages(self) -> list[float]:
        """[T_i], of each policy token, in the order of the rows."""
        if not self.turns:
            return [self.advantage] * self.rows.policy_tokens
        return [self.advantage + self.turns.get(m, 0.0) for m in self.rows.token_messages()]

    @property
    def silent(self) -> bool:
        """Whether it says nothing: no policy token has an advantage."""
        return all(abs(a) < NO_SIGNAL for a in set(self.advantages()))


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Members, and the denominators fixed at claim.

    `size` counts members that a verdict rejected, too; `tokens_per_rollout` is the mean that
    token_level divides by.
    """

    rollouts: Sequence[TrainingRollout]
    size: int
    tokens_per_rollout: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of the batch; `gated_out` has rollout ids."""

    outcome: Outcome
    gated_out: tuple[int, ...]
    policy_tokens: int
    metrics: dict[str, float]


def train_batch(
    policy: PolicyModel,
    optimizer: AdapterOptimizer,
    batch: TrainingBatch,
    settings: PolicySettings,
    *,
    step_number: int,
    load_version: Callable[[int], Path | None],
    advance: Callable[[int, int, int], None] = lambda rows, done, tokens: None,
    ranks: Ranks = ALONE,
) -> StepResult:
    """Make one optimizer step, or say why there is none; with `ranks`, together, each with the same call.

    `step_number` is 1 for a policy's first step. `load_version` gives the folder of a version's
    adapter, None for version 0. `advance` hears of each micro-batch: rows of the batch, rows done,
    policy tokens done. Raises TrainingFailed for whatever rows, forward or backward
    raise; what `load_version` raises passes through. Out of memory halves the token budget.
    """
    members = [r for r in batch.rollouts if r.rows.verdict != "untrainable"]
    policy_tokens = sum(r.rows.policy_tokens for r in members)
    outcome: Outcome | None = None
    if not members:
        outcome = "none_trainable"
    elif all(r.silent for r in members):
        outcome = "no_signal"
    if outcome is not None:
        return StepResult(outcome, (), policy_tokens, _batch_metrics(batch, members))
    rows, heads = [r.rows for r in members], [r.version_is_head for r in members]
    folders = {version: load_version(version) for version in missing_versions(rows, heads)}
    run = _Run(policy, optimizer, batch, members, settings, step_number, folders, advance, ranks=ranks)
    return run.within_memory()


def dry_run(
    policy: PolicyModel, optimizer: AdapterOptimizer, batch: TrainingBatch, settings: PolicySettings
) -> None:
    """Run forward and backward of members sampled by the head, without a step.

    Raises TrainingFailed as `train_batch` does; adapter and optimizer stay bit-identical.
    """
    run = _Run(policy, optimizer, batch, batch.rollouts, settings, 1, {}, stepping=False)
    run.within_memory()


def _batch_metrics(batch: TrainingBatch, members: Sequence[TrainingRollout]) -> dict[str, float]:
    everyone = batch.rollouts
    figures = {
        "n_traj": float(len(members)),
        "n_rows": float(sum(len(r.rows.rows) for r in members)),
        "n_tokens": float(sum(r.rows.policy_tokens for r in members)),
        "untrainable": float(len(everyone) - len(members)),
    }
    if everyone:
        figures |= metrics.rollout_metrics([r.reward for r in everyone], [r.advantage for r in everyone])
    return figures | metrics.turn_metrics([(r.turns, r.rows.token_messages()) for r in members if r.turns])


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of `train_batch` that has something to train on."""

    policy: PolicyModel
    optimizer: AdapterOptimizer
    batch: TrainingBatch
    members: Sequence[TrainingRollout]
    settings: PolicySettings
    step_number: int
    folders: Mapping[int, Path | None]
    advance: Callable[[int, int, int], None] = lambda rows, done, tokens: None
    stepping: bool = True
    """False: forward and backward only, to see whether they raise."""
    ranks: Ranks = ALONE

    def within_memory(self) -> StepResult:
        """Try with ever smaller micro-batches while memory runs out."""
        longest = max(len(row.input_ids) for r in self.members for row in r.rows.rows)
        budget = self.policy.token_budget(self.settings.sequences.token_budget)
        while True:
            try:
                return self.attempt(budget)
            except torch.OutOfMemoryError as error:
                self.optimizer.zero_grad()
                if budget <= longest:
                    raise TrainingFailed(
                        f"out of memory on a row of {longest} tokens", code="out_of_memory"
                    ) from error
                budget //= 2
            except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
                self.optimizer.zero_grad()
                raise TrainingFailed(f"{type(error).__name__}: {error}") from error

    def attempt(self, budget: int) -> StepResult:
        """Accumulate the gradient of the whole batch, then step or not."""
        started = time.perf_counter()
        self.optimizer.zero_grad()
        members = self.prepare(budget)
        plan = micro_batches([m.rows for m in members], budget, padded=self.policy.padded)
        passed = self.accumulate(members, plan, budget)
        kept = {i: bool(k) for p in passed for i, k in zip(p.members, p.kept, strict=True)}
        gated_out = tuple(m.rollout_id for i, m in enumerate(self.members) if not kept[i])
        figures = _batch_metrics(self.batch, self.members) | self.figures(passed, len(gated_out))
        outcome: Outcome = "stepped"
        if not any(kept.values()):
            outcome = "all_gated_out"
        elif all(m.silent for i, m in enumerate(self.members) if kept[i]):
            outcome = "no_signal"
        if outcome == "stepped" and self.stepping:
            self.ranks.sum_gradients(self.policy.parameters())
            figures |= self.step()
        self.optimizer.zero_grad()
        figures |= _costs(figures["n_tokens"], time.perf_counter() - started)
        return StepResult(outcome, gated_out, int(figures["n_tokens"]), figures)

    def accumulate(
        self, members: Sequence[Member], plan: Sequence[tuple[int, ...]], budget: int
    ) -> list[Passed]:
        """Accumulate this rank's share of the gradient; return what every rank's micro-batches left."""
        parts = self.ranks.agree(lambda: self._accumulate(members, plan, budget))
        return [passed for part in parts for passed in part]

    def _accumulate(
        self, members: Sequence[Member], plan: Sequence[tuple[int, ...]], budget: int
    ) -> list[Passed]:
        share = self.ranks.share(plan)
        own: list[Passed] = []
        rows, done, tokens = sum(len(members[i].rows) for group in share for i in group), 0, 0
        for group in share:
            own.append(accumulate(self.policy, group, members, self.settings.objective, budget))
            done += sum(len(members[i].rows) for i in group)
            tokens += len(own[-1].tokens.logprobs)
            self.advance(rows, done, tokens)
        run_along(self.policy, self.ranks, plan, grad=True)
        return own

    def prepare(self, budget: int) -> list[Member]:
        """Score what must be scored beforehand, and fix every token's weight and advantage."""
        objective_settings = self.settings.objective
        rows = [r.rows for r in self.members]
        scores = score(
            self.policy,
            rows,
            [r.version_is_head for r in self.members],
            self.folders,
            budget,
            with_reference=objective_settings.reference_kl > 0,
            ranks=self.ranks,
        )
        weights = objective.token_weights(
            objective_settings.aggregation,
            [r.policy_tokens for r in rows],
            self.batch.size,
            self.batch.tokens_per_rollout,
        )
        advantages = self.token_advantages(scores, budget)
        return [
            Member(r.rows, s.sampler, s.reference, a, w)
            for r, s, a, w in zip(rows, scores, advantages, weights, strict=True)
        ]

    def token_advantages(self, scores: Sequence[Scores], budget: int) -> list[torch.Tensor]:
        """Each rollout's advantage at each of its tokens, with k1's share where it is in use."""
        plain = [s.sampler.new_tensor(r.advantages()) for s, r in zip(scores, self.members, strict=True)]
        use = self.settings.objective
        references = [s.reference for s in scores if s.reference is not None]
        if use.reference_kl_estimator != "k1_in_reward" or not references:
            return plain
        rows = [row for r in self.members for row in r.rows.rows]
        current = logprobs_of(self.policy, dict(enumerate(rows)), budget, self.ranks)
        shares = objective.k1_advantages(
            torch.cat([current[i] for i in range(len(rows))]),
            torch.cat(references),
            owners([len(a) for a in plain]),
            use.reference_kl,
        )
        return [a + k for a, k in zip(plain, torch.split(shares, [len(a) for a in plain]), strict=True)]

    def step(self) -> dict[str, float]:
        """Step the optimizer and say how far it moved; an adapter that did not move is an error."""
        parameters = self.policy.parameters()
        before = {name: p.detach().clone() for name, p in parameters.items()}
        self.optimizer.use(self.settings.optimizer)
        norm = self.optimizer.step(self.step_number)
        moved = [(p.detach() - before[name]).norm() for name, p in parameters.items()]
        update = float(torch.stack(moved).norm())
        if not update > 0:
            raise TrainingFailed("the step left the adapter unchanged", code="adapter_unchanged")
        adapter = self.settings.adapter
        current = {name: p.detach() for name, p in parameters.items()}
        return {
            "grad_norm": norm,
            "update_norm": update,
            "lora_norm": metrics.adapter_norm(current, adapter.alpha / adapter.rank),
            "lr": self.optimizer.learning_rate(self.step_number),
        }

    def figures(self, passed: Sequence[Passed], gated_out: int) -> dict[str, float]:
        """Figures over all tokens, whichever micro-batch they were in."""
        together = concatenated([p.tokens for p in passed])
        entropy = torch.cat([p.entropy for p in passed])
        return metrics.token_metrics(together, entropy, self.settings.objective) | {
            "loss/pg": sum(p.policy_loss for p in passed),
            "loss/kl": sum(p.reference_loss for p in passed),
            "is/gate_reject_frac": gated_out / len(self.members),
            "n_micro_batches": float(len(passed)),
        }


def _costs(tokens: float, seconds: float) -> dict[str, float]:
    peak = (
        torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {"seconds": seconds, "tok_per_s": tokens / seconds, "peak_mem": float(peak)}
