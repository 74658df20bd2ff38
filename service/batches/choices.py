"""The state of `baseline: auto`, a policy's at a time: read before a batch, advanced after it.

What the choice is made of lives in baselines/selection.py. Invariants: no reward that choice or
hyperparameters rest on belongs to a rollout that can still enter a batch, or its own baseline would
depend on it: they advance over *ended* batches, whose candidates were scored on *settled* history
(`history.settled`); every candidate's error on every batch is stored with the batch; a scheduler that
dies before `observe` costs the choice one batch and training nothing.
"""

import json
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text

from service.baselines import selection
from service.baselines.estimators import Estimator, make_estimator
from service.baselines.marginal_likelihood import FIT_POINTS
from service.baselines.selection import Selection
from service.batches import history
from service.batches.history import Rewarded
from service.database.engine import transaction
from service.policies import Baseline

_LOAD = text("SELECT document FROM baseline_choices WHERE policy_id = :policy")

_SAVE = text("""
INSERT INTO baseline_choices AS c (policy_id, batch, document)
VALUES (:policy, :batch, CAST(:document AS jsonb))
-- an older batch's scheduler that comes late must not turn the state back
ON CONFLICT (policy_id) DO UPDATE SET batch = excluded.batch, document = excluded.document
WHERE c.batch < excluded.batch
""")

# In order: a batch that lives holds back those after it, which end after it anyway.
_ENDED = text("""
SELECT b.number, b.candidate_errors FROM batches b
WHERE b.policy_id = :policy AND b.state IN ('trained', 'no_step') AND b.candidate_errors IS NOT NULL
  AND b.number > coalesce((SELECT c.batch FROM baseline_choices c WHERE c.policy_id = :policy), -1)
  AND NOT EXISTS (SELECT FROM batches l
                  WHERE l.policy_id = :policy AND l.state = 'ready' AND l.number < b.number)
ORDER BY b.number LIMIT :limit
""")

_PAST = text("""
SELECT m.rollout_id FROM batches b JOIN batch_members m ON m.batch_id = b.id
WHERE b.policy_id = :policy AND b.state IN ('trained', 'no_step') AND b.number <= :number
ORDER BY b.number DESC, m.position DESC LIMIT :limit
""")

_ERRORS = text("UPDATE batches SET candidate_errors = CAST(:errors AS jsonb) WHERE id = :id")


@dataclass(frozen=True, slots=True)
class Formed:
    """A batch just formed, with what its candidates are scored on."""

    id: int
    number: int
    members: Rewarded
    past: Rewarded
    settled: Rewarded
    """The part of the past that no batch can hold any more."""
    state: Selection


@dataclass(frozen=True, slots=True)
class Ended:
    """Batches that ended since the state advanced last."""

    number: int
    """Of the newest of them."""
    state: Selection
    """With their errors, not fitted anew."""
    to_fit: list[int]
    """Rollouts that hyperparameters are to be fitted to now, oldest first."""


def load(connection: Connection, policy_id: int) -> Selection:
    """Return the policy's state; a new policy starts cold."""
    document = connection.execute(_LOAD, {"policy": policy_id}).scalar_one_or_none()
    return Selection() if document is None else Selection.from_document(document)


def estimator(settings: Baseline, state: Selection, history_size: int) -> Estimator:
    """Return the estimator that scores the next batch.

    A softmax over a short history is worse than the batch mean, which then stands in for it.
    """
    if settings.estimator == selection.AUTO:
        return state.candidate(state.chosen)
    if settings.estimator.endswith("_softmax"):
        if history_size < settings.minimum_history:
            return make_estimator("leave_one_out")
        return make_estimator(settings.estimator, temperature=settings.temperature)
    return state.candidate(settings.estimator)


def observe(engine: Engine, formed: Formed) -> None:
    """Score every candidate on a formed batch and store the errors with it."""
    batch = formed.members.scored
    made = selection.predictions(formed.state, batch, formed.settled.scored)
    errors = json.dumps(selection.squared_errors(made, batch))
    with transaction(engine) as connection:
        connection.execute(_ERRORS, {"id": formed.id, "errors": errors})


def ended(connection: Connection, policy_id: int) -> Ended | None:
    """Return what the state has to learn from batches that ended meanwhile; None: nothing."""
    rows = connection.execute(_ENDED, {"policy": policy_id, "limit": selection.COMPARED_BATCHES}).all()
    if not rows:
        return None
    state, due = load(connection, policy_id), False
    for row in rows:
        state = selection.scored(state, row.candidate_errors)
        due = due or selection.refit_is_due(state)
    number: int = rows[-1].number
    return Ended(number, state, _past(connection, policy_id, number) if due else [])


def _past(connection: Connection, policy_id: int, number: int) -> list[int]:
    """Return the newest members of ended batches that are settled, oldest first."""
    asked = {"policy": policy_id, "number": number, "limit": FIT_POINTS}
    found = list(connection.execute(_PAST, asked).scalars())[::-1]
    settled = history.settled(connection, found)
    return [rollout for rollout in found if rollout in settled]


def advance(engine: Engine, policy_id: int, found: Ended, seen: Rewarded) -> None:
    """Fit to what was seen, if anything, and store the state for the next batch."""
    state = selection.refitted(found.state, seen.scored) if seen.ids else found.state
    document = json.dumps(state.as_document())
    with transaction(engine) as connection:
        connection.execute(_SAVE, {"policy": policy_id, "batch": found.number, "document": document})
