"""Assembly: when a batch is due, which rollouts it takes, and its baselines.

Invariants: one transaction under `pg_try_advisory_xact_lock(policy)`, and the constraints decide all
the same; a rollout has at most one live membership, a task one place in a batch; which rollouts are
taken depends on age alone, never on reward; history is cut off before the members are drawn.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import Connection, text

from service.baselines.estimators import Baselines
from service.baselines.selection import Selection
from service.batches import candidates, choices, counts, gates, history
from service.batches.choices import Formed
from service.batches.counts import Count
from service.batches.history import Rewarded
from service.batches.locks import ASSEMBLY, try_lock
from service.policies import PolicySettings

NEIGHBOURS_KEPT = 16
"""Heaviest neighbours stored a member; the count of the others is stored too."""
NO_SIGNAL = 1e-9
"""Greatest |advantage| that still says nothing."""

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

# Under the lock: nothing that the view rests on has changed since.
_STILL_DUE = text("""
SELECT NOT p.paused AND p.settings_revision = :revision AND l.head_version = :head
       AND (SELECT count(*) FROM batches b WHERE b.policy_id = p.id AND b.state = 'ready') < :most
FROM policies p JOIN lineages l ON l.policy_id = p.id WHERE p.id = :policy
""")

# Skipping what a writer holds: its grade decides first, and the batch is formed a moment later.
_LOCK_MEMBERS = text("""
SELECT id FROM rollouts
WHERE id = ANY(:ids) AND state = 'ready'
  AND gate_epoch = (SELECT gate_epoch FROM policies WHERE id = :policy)
ORDER BY id FOR UPDATE SKIP LOCKED
""")

_NEW_BATCH = text("""
INSERT INTO batches (policy_id, number, state, outcome, size, settings_revision, estimator, parameters,
                     ended_at)
VALUES (:policy, :number, :state, :outcome, :size, :revision, :estimator, CAST(:parameters AS jsonb),
        CASE WHEN :state = 'ready' THEN NULL ELSE clock_timestamp() END)
RETURNING id
""")

_NEW_MEMBERS = text("""
INSERT INTO batch_members (batch_id, rollout_id, position, task_key, live, reward, baseline, advantage,
                           neighbours, neighbours_left_out)
SELECT :batch, rollout_id, position, task_key, :live, reward, baseline, advantage, neighbours, left_out
FROM unnest(CAST(:rollout_id AS bigint[]), CAST(:position AS integer[]), CAST(:task_key AS text[]),
            CAST(:reward AS float8[]), CAST(:baseline AS float8[]), CAST(:advantage AS float8[]),
            CAST(:neighbours AS jsonb[]), CAST(:left_out AS integer[]))
     AS new (rollout_id, position, task_key, reward, baseline, advantage, neighbours, left_out)
""")

_MARK = text("""
UPDATE rollouts SET state = :state, reason = :reason, due_at = NULL WHERE id = ANY(:ids)
""")

_NEXT_NUMBER = text(
    "UPDATE lineages SET next_batch = next_batch + 1 WHERE policy_id = :policy RETURNING next_batch - 1"
)


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


def needed_rollouts(connection: Connection, view: Outlook) -> list[int]:
    """Return the rollouts whose embeddings a batch formed now would need."""
    return [*view.candidates, *_window(connection, view, view.candidates)]


def assemble(connection: Connection, view: Outlook, encoder: str) -> Formed | None:
    """Form one batch from the view's candidates.

    Returns None when another scheduler is at this policy or took a candidate, or a writer holds one.
    Raises EmbeddingMissing when the cache lacks a vector: embed and try again.
    """
    if not view.candidates or not try_lock(connection, ASSEMBLY, view.policy_id):
        return None
    if not _still_due(connection, view):
        return None
    wanted = {"ids": sorted(view.candidates), "policy": view.policy_id}
    if set(connection.execute(_LOCK_MEMBERS, wanted).scalars()) != set(view.candidates):
        return None
    members = history.load(connection, view.candidates, encoder)
    past = history.load(connection, _window(connection, view, view.candidates), encoder)
    state = choices.load(connection, view.policy_id)
    made = estimate(view.settings, state, members, past)
    batch_id, number = _store(connection, view, members, past, made)
    return Formed(batch_id, view.policy_id, number, members, past, state)


def _still_due(connection: Connection, view: Outlook) -> bool:
    due: bool = connection.execute(
        _STILL_DUE,
        {
            "policy": view.policy_id, "revision": view.revision, "head": view.head_version,
            "most": view.settings.batching.max_ready_batches,
        },
    ).scalar_one()  # fmt: skip
    return due


def estimate(settings: PolicySettings, state: Selection, members: Rewarded, past: Rewarded) -> Baselines:
    """Compute the batch's baselines by the estimator that the settings, or `auto`'s state, name."""
    estimator = choices.estimator(settings.baseline, state, len(past.ids))
    return estimator.predict(members.scored, past.scored)


def _window(connection: Connection, view: Outlook, members: Sequence[int]) -> list[int]:
    limit = view.settings.baseline.window_batches * view.settings.batching.size
    return history.window(connection, view.policy_id, cutoff=view.now, members=members, limit=limit)


def _store(
    connection: Connection, view: Outlook, members: Rewarded, past: Rewarded, made: Baselines
) -> tuple[int, int]:
    """Insert batch and members; return the batch's id and number."""
    rewards = members.scored.rewards
    advantages = rewards - made.values
    silent = bool(np.all(np.abs(advantages) < NO_SIGNAL))
    number: int = connection.execute(_NEXT_NUMBER, {"policy": view.policy_id}).scalar_one()
    batch_id: int = connection.execute(
        _NEW_BATCH,
        {
            "policy": view.policy_id, "number": number, "size": len(members.ids), "revision": view.revision,
            "state": "no_step" if silent else "ready", "outcome": "no_signal" if silent else "",
            "estimator": made.estimator, "parameters": json.dumps(_parameters(view, past, made)),
        },
    ).scalar_one()  # fmt: skip
    neighbours, left_out = _neighbours(made.weights, [*members.ids, *past.ids])
    connection.execute(
        _NEW_MEMBERS,
        {
            "batch": batch_id, "live": not silent, "rollout_id": members.ids,
            "position": list(range(len(members.ids))),
            "task_key": [task.task_key for task in members.scored.tasks], "reward": rewards.tolist(),
            "baseline": made.values.tolist(), "advantage": advantages.tolist(),
            "neighbours": [json.dumps(pairs) for pairs in neighbours], "left_out": left_out,
        },
    )  # fmt: skip
    state, reason = ("excluded", "no_signal") if silent else ("batched", f"batch {number}")
    connection.execute(_MARK, {"state": state, "reason": reason, "ids": members.ids})
    return batch_id, number


def _parameters(view: Outlook, past: Rewarded, made: Baselines) -> dict[str, Any]:
    # The batch mean uses no history by nature; it is a fall-back only where something else was asked for.
    own = made.estimator == "leave_one_out" == view.settings.baseline.estimator
    return {
        **made.parameters,
        "n_eff_p10": float(np.quantile(made.neighbours, 0.1)),
        "fallback_frac": 0.0 if own else float(made.fell_back.mean()),
        "window_batches": view.settings.baseline.window_batches,
        "history": len(past.ids),
        "cutoff": view.now.isoformat(),
    }


def _neighbours(
    weights: np.ndarray[Any, np.dtype[np.float64]], ids: list[int]
) -> tuple[list[list[Any]], list[int]]:
    kept, left_out = [], []
    for row in weights:
        used = np.flatnonzero(row)
        heaviest = used[np.argsort(-np.abs(row[used]), kind="stable")][:NEIGHBOURS_KEPT]
        kept.append([[ids[at], float(row[at])] for at in heaviest])
        left_out.append(len(used) - len(heaviest))
    return kept, left_out
