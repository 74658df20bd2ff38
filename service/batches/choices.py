"""The state of `baseline: auto`, a policy's at a time: read before a batch, advanced after it.

What the choice is made of lives in baselines/selection.py. Invariants: a batch is scored by the state
of earlier batches only; every candidate's error on every batch is stored with the batch; a scheduler
that dies before `observe` costs the choice one batch and training nothing.
"""

import json
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text

from service.baselines import selection
from service.baselines.estimators import Baselines, Estimator, make_estimator
from service.baselines.selection import Selection
from service.batches.history import Rewarded
from service.database.engine import transaction
from service.policies import Baseline

AUTO = "auto"

_LOAD = text("SELECT document FROM baseline_choices WHERE policy_id = :policy")

_SAVE = text("""
INSERT INTO baseline_choices AS c (policy_id, batch, document)
VALUES (:policy, :batch, CAST(:document AS jsonb))
-- an older batch's scheduler that comes late must not turn the state back
ON CONFLICT (policy_id) DO UPDATE SET batch = excluded.batch, document = excluded.document
WHERE c.batch < excluded.batch
""")

_ERRORS = text("UPDATE batches SET candidate_errors = CAST(:errors AS jsonb) WHERE id = :id")


@dataclass(frozen=True, slots=True)
class Formed:
    """A batch just formed, with what its baselines were made from."""

    id: int
    policy_id: int
    number: int
    members: Rewarded
    past: Rewarded
    state: Selection


def load(connection: Connection, policy_id: int) -> Selection:
    """Return the policy's state; a new policy starts cold."""
    document = connection.execute(_LOAD, {"policy": policy_id}).scalar_one_or_none()
    return Selection() if document is None else Selection.from_document(document)


def estimator(settings: Baseline, state: Selection, history_size: int) -> Estimator:
    """Return the estimator that scores the next batch.

    A softmax over a short history is worse than the batch mean, which then stands in for it.
    """
    if settings.estimator == AUTO:
        return state.candidate(state.chosen)
    if settings.estimator.endswith("_softmax"):
        if history_size < settings.minimum_history:
            return make_estimator("leave_one_out")
        return make_estimator(settings.estimator, temperature=settings.temperature)
    return state.candidate(settings.estimator)


def observe(engine: Engine, formed: Formed) -> None:
    """Score every candidate on a formed batch, store the errors, advance the choice."""
    batch, past = formed.members.scored, formed.past.scored
    made = selection.predictions(formed.state, batch, past)
    advanced = selection.advanced(formed.state, made, batch, past)
    errors = {name: _mean_squared(formed, each) for name, each in made.items()}
    with transaction(engine) as connection:
        connection.execute(_ERRORS, {"id": formed.id, "errors": json.dumps(errors)})
        connection.execute(
            _SAVE,
            {
                "policy": formed.policy_id,
                "batch": formed.number,
                "document": json.dumps(advanced.as_document()),
            },
        )


def _mean_squared(formed: Formed, made: Baselines) -> float:
    return float(((formed.members.scored.rewards - made.values) ** 2).mean())
