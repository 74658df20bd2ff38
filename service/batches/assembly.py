"""Assembly: a due batch, its members and its baselines.

Invariants: one transaction under `pg_try_advisory_xact_lock(policy)`, and the constraints decide all
the same; a rollout has at most one live membership, a task one place in a batch; which rollouts are
taken depends on age alone, never on reward; history is cut off before the members are drawn.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, text

from service.baselines.estimators import Baselines
from service.baselines.features import Task
from service.baselines.selection import Selection
from service.batches import choices, history, turns
from service.batches.choices import Formed
from service.batches.history import Rewarded
from service.batches.locks import ASSEMBLY, try_lock
from service.batches.outlook import Outlook
from service.batches.turns import GradedTurn
from service.policies import PolicySettings

NEIGHBOURS_KEPT = 16
"""Heaviest neighbours stored a member; the count of the others is stored too."""
NO_SIGNAL = 1e-9
"""Greatest |advantage| that still says nothing."""

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


def needed_rollouts(connection: Connection, view: Outlook) -> list[int]:
    """Return the rollouts whose embeddings a batch formed now would need."""
    return [*view.candidates, *_window(connection, view, view.candidates)]


def assemble(
    connection: Connection, view: Outlook, encoder: str, known: Mapping[int, Task] = history.NOTHING_KNOWN
) -> Formed | None:
    """Form one batch from the view's candidates; tasks that are `known` are not read again.

    Returns None when another scheduler is at this policy or took a candidate, or a writer holds one.
    Raises VectorMissing when the cache lacks a vector: embed and try again.
    """
    if not view.candidates or not try_lock(connection, ASSEMBLY, view.policy_id):
        return None
    if not _still_due(connection, view):
        return None
    wanted = {"ids": sorted(view.candidates), "policy": view.policy_id}
    if set(connection.execute(_LOCK_MEMBERS, wanted).scalars()) != set(view.candidates):
        return None
    members = history.load(connection, view.candidates, encoder, known)
    past = history.load(connection, _window(connection, view, view.candidates), encoder, known)
    state = choices.load(connection, view.policy_id)
    made = estimate(view.settings, state, members, past)
    graded: list[GradedTurn] = []
    if view.settings.objective.turn_weight:
        estimator = choices.estimator(view.settings.baseline, state, len(past.ids))
        graded = turns.compared(connection, members, estimator, encoder)
    batch_id, number = _store(connection, view, members, past, made, graded=graded)
    turns.store(connection, batch_id, graded)
    settled = past.among(history.settled(connection, past.ids))
    return Formed(batch_id, number, members, past, settled, state)


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
    connection: Connection,
    view: Outlook,
    members: Rewarded,
    past: Rewarded,
    made: Baselines,
    *,
    graded: Sequence[GradedTurn],
) -> tuple[int, int]:
    """Insert batch and members; return the batch's id and number."""
    rewards = members.scored.rewards
    advantages = rewards - made.values
    terms = view.settings.objective.turn_weight * np.array([turn.advantage or 0.0 for turn in graded])
    silent = bool(np.all(np.abs([*advantages, *terms]) < NO_SIGNAL))
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
