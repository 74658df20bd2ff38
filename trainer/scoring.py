"""Log-probabilities without a gradient: under the reference, and under a rollout's own version.

Knows rows and adapters' folders, no objective. Invariants: the trained adapter comes out of it bit
for bit as it went in; logprobs that came with a rollout are never replaced.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.checkpoint import load_adapter
from trainer.packing import lay_out, micro_batches
from trainer.policy import PolicyModel, policy_logprobs
from trainer.ranks import ALONE, Ranks
from trainer.sequences import RolloutRows, Row
from trainer.sharding import run_along


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one rollout's policy tokens, [T_i] each; `sampler` NaN: the ratio counts as 1."""

    sampler: torch.Tensor
    reference: torch.Tensor | None


def missing_versions(rollouts: Sequence[RolloutRows], heads: Sequence[bool]) -> set[int]:
    """Versions under which sampler logprobs must be recomputed; `heads[i]`: i is of the head's."""
    return {
        version
        for rollout, is_head in zip(rollouts, heads, strict=True)
        for row, version in zip(rollout.rows, rollout.versions, strict=True)
        if not is_head and _lacks(row)
    }


def _lacks(row: Row) -> bool:
    return bool(row.sampler_logprobs[row.loss_mask].isnan().any())


def score(
    policy: PolicyModel,
    rollouts: Sequence[RolloutRows],
    heads: Sequence[bool],
    folders: Mapping[int, Path | None],
    budget: int,
    *,
    with_reference: bool,
    ranks: Ranks = ALONE,
) -> list[Scores]:
    """Score a batch; `folders` has each missing version's folder, None for the base.

    The reference is the base: version 0's adapter is zero, so that one pass serves both.
    """
    rows = [row for rollout in rollouts for row in rollout.rows]
    versions = [version for rollout in rollouts for version in rollout.versions]
    of_head = [h for r, h in zip(rollouts, heads, strict=True) for _ in r.rows]
    base: dict[int, torch.Tensor] = {}
    if with_reference:
        with adapter_of(policy, None):
            base = logprobs_of(policy, dict(enumerate(rows)), budget, ranks)
    found: dict[int, torch.Tensor] = {}
    for version, folder in sorted(folders.items()):
        wanted = {
            i: row for i, row in enumerate(rows) if versions[i] == version and not of_head[i] and _lacks(row)
        }
        if folder is None and with_reference:
            found |= {i: base[i] for i in wanted}
        else:
            with adapter_of(policy, folder):
                found |= logprobs_of(policy, wanted, budget, ranks)
    samplers = [_completed(row, found.get(i)) for i, row in enumerate(rows)]
    return _by_rollout(rollouts, samplers, base)


def _completed(row: Row, found: torch.Tensor | None) -> torch.Tensor:
    known = row.sampler_logprobs[row.loss_mask]
    return known if found is None else torch.where(known.isnan(), found, known)


def _by_rollout(
    rollouts: Sequence[RolloutRows],
    samplers: Sequence[torch.Tensor],
    base: Mapping[int, torch.Tensor],
) -> list[Scores]:
    scores, start = [], 0
    for rollout in rollouts:
        own = range(start, start + len(rollout.rows))
        reference = torch.cat([base[i] for i in own]) if base else None
        scores.append(Scores(torch.cat([samplers[i] for i in own]), reference))
        start += len(rollout.rows)
    return scores


def logprobs_of(
    policy: PolicyModel, rows: Mapping[int, Row], budget: int, ranks: Ranks = ALONE
) -> dict[int, torch.Tensor]:
    """Log-probabilities of each row's policy tokens under the active adapter, on the CPU.

    With `ranks`, each of them computes its share and all of them get the whole.
    """
    keys = list(rows)
    plan = micro_batches([[rows[k]] for k in keys], budget, padded=policy.padded)
    own = [{keys[i]: rows[keys[i]] for i in members} for members in ranks.share(plan)]

    def work() -> list[dict[int, torch.Tensor]]:
        found = [_logprobs(policy, group) for group in own]
        run_along(policy, ranks, plan, grad=False)
        return found

    parts = ranks.agree(work)
    return {key: values for part in parts for group in part for key, values in group.items()}


def _logprobs(policy: PolicyModel, rows: Mapping[int, Row]) -> dict[int, torch.Tensor]:
    layout = lay_out(list(rows.values()), padded=policy.padded, device=policy.device)
    with torch.no_grad():
        values = policy_logprobs(policy, layout)[0].cpu()
    counts = [int(row.loss_mask.sum()) for row in rows.values()]
    return dict(zip(rows, torch.split(values, counts), strict=True))


@contextmanager
def adapter_of(policy: PolicyModel, folder: Path | None) -> Iterator[None]:
    """Put another version's adapter in place for a while; None: the base.

    The trained weights wait in a copy and come back whatever happens. A second adapter inside the
    model would cost the same memory, but switching adapters also switches what is trainable.
    """
    if folder is None:
        with policy.model.disable_adapter():
            yield
        return
    trained = {name: p.detach().clone() for name, p in policy.parameters().items()}
    try:
        load_adapter(policy, folder)
        yield
    finally:
        with torch.no_grad():
            for name, parameter in policy.parameters().items():
                parameter.copy_(trained[name])
