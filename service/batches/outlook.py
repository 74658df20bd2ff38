"""What is to be seen of a policy before a batch: which rollouts it would take, and what it waits for.

Must run inside the caller's transaction. Knows no baselines, so that what only reports (status, alerts)
loads none. Invariant: assembly and status ask the same question here, so a status never says other than
what is done.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from service.batches import candidates, counts, gates
from service.batches.counts import Count
from service.policies import PolicySettings

_POLICY = text("""
SELECT p.id, p.name, p.paused, p.paused_code, p.paused_reason, p.settings_revision, p.gate_epoch, s.document,
       l.head_version, l.head_depth, l.next_batch, l.promoted_version, v.depth AS promoted_depth,
       l.promotion_held,
       clock_timestamp() AS now,
       (SELECT count(*) FROM batches b WHERE b.policy_id = p.id AND b.state = 'ready') AS ready_batches
FROM policies p
JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
JOIN lineages l ON l.policy_id = p.id
JOIN policy_versions v ON v.policy_id = p.id AND v.version = l.promoted_version
WHERE p.id = :policy
""")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What assembly sees of a policy: enough to form a batch or to say in words why not."""

    policy_id: int
    policy: str
    paused: bool
    paused_code: str
    """Which guard paused it; empty: a person."""
    paused_reason: str
    revision: int
    settings: PolicySettings
    head_version: int
    next_batch: int
    promoted_version: int
    least_depth: int
    ahead_of_promoted: int
    """Steps from what serves to the head."""
    promotion_held: bool
    """Whether `promoted` was rolled back alone, so that no step moves it."""
    ready_batches: int
    oldest_ready_age_seconds: float | None
    now: datetime
    counted: list[Count]
    fresh: int
    """Ready rollouts that are not stale, of whatever tasks."""
    fresh_depths: list[int]
    outdated: bool
    """Whether ready rollouts still have to be evaluated under a changed rule."""
    candidates: list[int]
    """Fresh rollouts of different tasks, in the order in which they are taken, at most one batch."""

    @property
    def blocked_by(self) -> str:
        """Say in words why no batch is formed now; empty: one is due."""
        batching, ready = self.settings.batching, len(self.candidates)
        if obstacle := self._held_up():
            return obstacle
        if ready >= batching.size:
            return ""
        if batching.max_wait_seconds is None or ready < batching.min_size:
            return f"needs {batching.size - ready} more rewarded tasks"
        wait = batching.max_wait_seconds - (self.oldest_ready_age_seconds or 0.0)
        return f"a partial batch of {ready} goes in {wait:.0f} s" if wait > 0 else ""

    def _held_up(self) -> str:
        """Say what keeps even a full batch from being formed."""
        promotion = self.settings.promotion
        if self.paused:
            return "the policy is paused" + (f": {self.paused_reason}" if self.paused_reason else "")
        if self.ready_batches >= self.settings.batching.max_ready_batches:
            return f"{self.ready_batches} batch(es) wait for the trainer"
        waits = promotion.mode != "auto" or self.promotion_held
        if waits and self._ahead() >= promotion.max_ahead_of_promoted:
            return (
                f"training is {self._ahead()} version(s) ahead of version {self.promoted_version}, which "
                f"serves: promote version {self.head_version}"
            )
        return "rollouts are being evaluated under the changed rule" if self.outdated else ""

    def _ahead(self) -> int:
        return self.ahead_of_promoted + self.ready_batches


def outlook(connection: Connection, policy_id: int) -> Outlook:
    """Look at one policy's ready rollouts."""
    row = connection.execute(_POLICY, {"policy": policy_id}).one()
    settings = PolicySettings.model_validate(row.document)
    least_depth = row.head_depth - settings.batching.max_staleness
    counted = counts.read(connection, policy_id)
    fresh = [count for count in counted if count.state == "ready" and count.depth >= least_depth]
    depths = sorted({count.depth for count in fresh})
    chosen, oldest = candidates.choose(
        connection, policy_id, depths, settings.batching.size,
        newest=settings.batching.overload.take == "newest",
    )  # fmt: skip
    return Outlook(
        policy_id=row.id, policy=row.name, paused=row.paused, paused_code=row.paused_code,
        paused_reason=row.paused_reason, revision=row.settings_revision,
        settings=settings, head_version=row.head_version, next_batch=row.next_batch,
        promoted_version=row.promoted_version,
        least_depth=least_depth, ahead_of_promoted=row.head_depth - row.promoted_depth,
        promotion_held=row.promotion_held,
        ready_batches=row.ready_batches, now=row.now, counted=counted,
        oldest_ready_age_seconds=None if oldest is None else (row.now - oldest).total_seconds(),
        fresh=sum(count.amount for count in fresh), fresh_depths=depths,
        outdated=gates.is_outdated(connection, policy_id), candidates=chosen,
    )  # fmt: skip
