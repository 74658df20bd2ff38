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

from service.baselines.estimators import Baselines, make_estimator
from service.batches import history
from service.batches.history import Rewarded
from service.policies import PolicySettings

NEIGHBOURS_KEPT = 16
"""Heaviest neighbours stored a member; the count of the others is stored too."""
NO_SIGNAL = 1e-9
"""Greatest |advantage| that still says nothing."""
_LOCK_SPACE = 0x6261_7463  # "batc": apart from other advisory locks of the database

_POLICY = text("""
SELECT p.id, p.name, p.paused, p.settings_revision, s.document, l.head_version, l.head_depth, l.next_batch,
       clock_timestamp() AS now,
       (SELECT count(*) FROM batches b WHERE b.policy_id = p.id AND b.state = 'ready') AS ready_batches,
       (SELECT min(ready_at) FROM rollouts r WHERE r.policy_id = p.id AND r.state = 'ready') AS oldest_ready
FROM policies p
JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
JOIN lineages l ON l.policy_id = p.id
WHERE p.id = :policy
""")

_OLDEST = text("""
SELECT id, task_key FROM rollouts
WHERE policy_id = :policy AND state = 'ready' AND depth >= :least_depth AND task_key <> ALL(:taken)
ORDER BY ready_at, id LIMIT :limit
""")

_LOCK_MEMBERS = text(
    "SELECT id FROM rollouts WHERE id = ANY(:ids) AND state = 'ready' ORDER BY id FOR UPDATE"
)

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
    revision: int
    settings: PolicySettings
    least_depth: int
    ready_batches: int
    oldest_ready_age_seconds: float | None
    now: datetime
    candidates: list[int]
    """Oldest ready rollouts of different tasks, at most one batch of them."""

    @property
    def blocked_by(self) -> str:
        """Say in words why no batch is formed now; empty: one is due."""
        batching, ready = self.settings.batching, len(self.candidates)
        if self.paused:
            return "the policy is paused"
        if self.ready_batches >= batching.max_ready_batches:
            return f"{self.ready_batches} batch(es) wait for the trainer"
        if ready >= batching.size:
            return ""
        if batching.max_wait_seconds is None or ready < batching.min_size:
            return f"needs {self._short_of(batching.size)} more rewarded tasks"
        wait = batching.max_wait_seconds - (self.oldest_ready_age_seconds or 0.0)
        return f"a partial batch of {ready} goes in {wait:.0f} s" if wait > 0 else ""

    def _short_of(self, size: int) -> int:
        return size - len(self.candidates)


def outlook(connection: Connection, policy_id: int) -> Outlook:
    """Look at one policy's ready rollouts."""
    row = connection.execute(_POLICY, {"policy": policy_id}).one()
    settings = PolicySettings.model_validate(row.document)
    least_depth = row.head_depth - settings.batching.max_staleness
    age = None if row.oldest_ready is None else (row.now - row.oldest_ready).total_seconds()
    candidates = _oldest_tasks(connection, policy_id, least_depth, settings.batching.size)
    return Outlook(
        row.id, row.name, row.paused, row.settings_revision, settings, least_depth, row.ready_batches, age,
        row.now, candidates,
    )  # fmt: skip


def needed_rollouts(connection: Connection, view: Outlook) -> list[int]:
    """Return the rollouts whose embeddings a batch formed now would need."""
    return [*view.candidates, *_window(connection, view, view.candidates)]


def assemble(connection: Connection, view: Outlook, encoder: str) -> int | None:
    """Form one batch from the view's candidates and return its id.

    Returns None when another scheduler is at this policy or took a candidate. Raises
    EmbeddingMissing when the cache lacks a vector: embed and try again.
    """
    locked = connection.execute(
        text("SELECT pg_try_advisory_xact_lock(:space, :policy)"),
        {"space": _LOCK_SPACE, "policy": view.policy_id},
    ).scalar_one()
    held = (
        set(connection.execute(_LOCK_MEMBERS, {"ids": sorted(view.candidates)}).scalars())
        if locked
        else set()
    )
    if not view.candidates or held != set(view.candidates):
        return None
    members = history.load(connection, view.candidates, encoder)
    past = history.load(connection, _window(connection, view, view.candidates), encoder)
    baselines = estimate(view.settings, members, past)
    return _store(connection, view, members, past, baselines)


def estimate(settings: PolicySettings, members: Rewarded, past: Rewarded) -> Baselines:
    """Compute the batch's baselines by the policy's estimator; `leave_one_out` while history is short."""
    chosen = settings.baseline
    name = chosen.estimator
    if name == "embedding_softmax" and len(past.ids) < chosen.minimum_history:
        name = "leave_one_out"
    parameters = {"temperature": chosen.temperature} if name == "embedding_softmax" else {}
    return make_estimator(name, **parameters).predict(members.scored, past.scored)


def _oldest_tasks(connection: Connection, policy_id: int, least_depth: int, size: int) -> list[int]:
    """Return the oldest ready rollout of each of up to `size` tasks, oldest first."""
    chosen: dict[str, int] = {}
    while len(chosen) < size:
        limit = 2 * size
        rows = connection.execute(
            _OLDEST,
            {
                "policy": policy_id,
                "least_depth": least_depth,
                "taken": list(chosen),
                "limit": limit,
            },
        ).all()
        for row in rows:
            if len(chosen) < size:
                chosen.setdefault(row.task_key, row.id)
        if len(rows) < limit:
            break
    return list(chosen.values())


def _window(connection: Connection, view: Outlook, members: Sequence[int]) -> list[int]:
    limit = view.settings.baseline.window_batches * view.settings.batching.size
    return history.window(connection, view.policy_id, cutoff=view.now, members=members, limit=limit)


def _store(connection: Connection, view: Outlook, members: Rewarded, past: Rewarded, made: Baselines) -> int:
    rewards = members.scored.rewards
    advantages = rewards - made.values
    silent = bool(np.all(np.abs(advantages) < NO_SIGNAL))
    number = connection.execute(_NEXT_NUMBER, {"policy": view.policy_id}).scalar_one()
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
    return batch_id


def _parameters(view: Outlook, past: Rewarded, made: Baselines) -> dict[str, Any]:
    return {
        **made.parameters,
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
