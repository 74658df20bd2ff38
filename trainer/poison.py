"""Which rollouts make a batch fail: each one alone, forward and backward without a step.

Knows no database. What a rollout raises here is its diagnosis.
"""

from service.batches.claims import ClaimedBatch, ClaimedMember
from service.errors import TrainingFailed
from trainer.restore import Loaded
from trainer.sequences import build_rows
from trainer.step import TrainingBatch, TrainingRollout, dry_run


def find(loaded: Loaded, batch: ClaimedBatch) -> dict[int, str]:
    """Return the rollouts that fail alone, with what they raised."""
    found = {}
    for member in batch.members:
        diagnosis = _diagnose(loaded, batch, member)
        if diagnosis:
            found[member.rollout_id] = diagnosis
    return found


def _diagnose(loaded: Loaded, batch: ClaimedBatch, member: ClaimedMember) -> str:
    try:
        rows = build_rows(member.document, loaded.policy.tokenizer, loaded.settings.sequences)
        if rows.verdict == "untrainable":
            return ""
        # As if sampled by the head: no other version's files are needed to see whether it fails.
        rollout = TrainingRollout(member.rollout_id, rows, 1.0, member.reward, version_is_head=True)
        alone = TrainingBatch([rollout], batch.size, batch.tokens_per_rollout)
        dry_run(loaded.policy, loaded.optimizer, alone, batch.settings)
    except (TrainingFailed, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
