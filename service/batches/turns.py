"""Grades of single turns at assembly: read, compared with each other, stored with the batch.

Must run inside the caller's transaction, and only where the policy's `objective.turn_weight` is not 0.
Knows no estimator: the batch's own comes in. History is left out: earlier turns' conversations would have
to be read and cut again for every batch, so a turn is compared with the batch's other graded turns alone.

Invariants: no gate reads any of this; b_it knows nothing of message t or of what came after it
(baselines/turns.py); every graded turn of a member is stored, with the reason if it teaches nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, text

from service.baselines.estimators import Estimator, Scored
from service.baselines.features import TaskFeatures, first_action
from service.baselines.turns import features_before, text_digest, turn_baselines, turn_task
from service.batches import vectors
from service.batches.history import Rewarded
from service.batches.trust import in_quarantine
from service.batches.vectors import MissingText, VectorMissing
from service.database.documents import read_document
from service.schemas import has_token_ids

TURNS_TAUGHT = 64
"""Most turns of one rollout that teach, the first ones: each costs a prediction under the batch's locks."""

_NO_FEATURES = TaskFeatures("", 0, {})

# The mean of the graders, whatever the rule: rules, weights and criteria are about whole rollouts.
_GRADED = text(f"""
SELECT g.rollout_id, g.turn, array_agg(g.id ORDER BY g.id) AS grade_ids,
       -- ordered by grader, so that the order of arrival cannot change a bit
       least(greatest(sum(g.value ORDER BY g.grader) / count(*), 0), 1) AS reward
FROM grades g JOIN rollouts r ON r.id = g.rollout_id
WHERE g.rollout_id = ANY(:ids) AND g.current AND g.value IS NOT NULL AND g.turn IS NOT NULL
  AND g.name = 'overall'
  AND NOT {in_quarantine("r")}
GROUP BY g.rollout_id, g.turn
ORDER BY array_position(CAST(:ids AS bigint[]), g.rollout_id), g.turn
""")  # noqa: S608 - our own condition

_DOCUMENTS = text("SELECT rollout_id, normalised FROM rollout_documents WHERE rollout_id = ANY(:ids)")

_STORE = text("""
INSERT INTO batch_turns (batch_id, rollout_id, turn, reward, baseline, advantage, grade_ids, note)
SELECT :batch, rollout_id, turn, reward, baseline, advantage,
       ARRAY(SELECT jsonb_array_elements_text(grade_ids)::bigint), note
FROM unnest(CAST(:rollout_id AS bigint[]), CAST(:turn AS integer[]), CAST(:reward AS float8[]),
            CAST(:baseline AS float8[]), CAST(:advantage AS float8[]), CAST(:grade_ids AS jsonb[]),
            CAST(:note AS text[]))
     AS new (rollout_id, turn, reward, baseline, advantage, grade_ids, note)
""")


@dataclass(frozen=True, slots=True)
class GradedTurn:
    """One graded message of a rollout; `note` says why it teaches nothing, and then there are no features."""

    rollout_id: int
    turn: int
    reward: float
    grade_ids: list[int]
    features: TaskFeatures
    note: str = ""
    baseline: float | None = None

    @property
    def advantage(self) -> float | None:
        """r_it − b_it, before the policy's weight."""
        return None if self.baseline is None else self.reward - self.baseline

    @property
    def digest(self) -> bytes:
        """What its vector is cached by."""
        return text_digest(self.features)


def graded(connection: Connection, rollouts: Sequence[int]) -> list[GradedTurn]:
    """Read the turns of these rollouts that have a reward now, in the rollouts' order."""
    rows = connection.execute(_GRADED, {"ids": list(rollouts)}).all()
    ids = sorted({row.rollout_id for row in rows})
    stored = connection.execute(_DOCUMENTS, {"ids": ids}).all() if ids else []
    documents = {row.rollout_id: read_document(row.normalised) for row in stored}
    taught: Counter[int] = Counter()
    # Erased since the look: it has no document, and no batch will be formed with it.
    return [_turn(row, documents[row.rollout_id], taught) for row in rows if row.rollout_id in documents]


def _turn(row: Any, document: Mapping[str, Any], taught: Counter[int]) -> GradedTurn:
    note = obstacle(document, row.turn)
    if not note:
        taught[row.rollout_id] += 1
        note = "over_limit" if taught[row.rollout_id] > TURNS_TAUGHT else ""
    features = _NO_FEATURES if note else features_before(document, row.turn)
    return GradedTurn(row.rollout_id, row.turn, row.reward, list(row.grade_ids), features, note)


def obstacle(document: Mapping[str, Any], turn: int) -> str:
    """Why the tokens of message `turn` cannot be told for certain; empty: they can.

    `not_sampled`: no message of the policy. Where calls carry token ids, only these are trained:
    `no_token_ids`: none of them made the message; `several_calls`: more than one call says it did.
    """
    messages = document["messages"]
    if not first_action(document) <= turn < len(messages) or messages[turn]["role"] != "assistant":
        return "not_sampled"
    calls: Sequence[Mapping[str, Any]] = document.get("calls", ())
    if not any(map(has_token_ids, calls)):
        return ""  # located by the chat template, message by message
    made = [has_token_ids(call) for call in calls if call["message_index"] == turn]
    if len(made) > 1:
        return "several_calls"
    return "" if any(made) else "no_token_ids"


def missing_texts(connection: Connection, rollouts: Sequence[int], encoder: str) -> dict[bytes, MissingText]:
    """Return the texts of these rollouts' graded turns that the cache has no vector of, by digest."""
    found = [turn for turn in graded(connection, rollouts) if not turn.note]
    known = vectors.known(connection, encoder, [turn.digest for turn in found])
    return {
        turn.digest: MissingText(turn.rollout_id, turn.features.text)
        for turn in found
        if turn.digest not in known
    }


def compared(
    connection: Connection, members: Rewarded, estimator: Estimator, encoder: str
) -> list[GradedTurn]:
    """Read the members' graded turns and give a baseline to each that can teach. Raises VectorMissing."""
    found = graded(connection, members.ids)
    teaching = [turn for turn in found if not turn.note]
    known = vectors.known(connection, encoder, [turn.digest for turn in teaching])
    if any(turn.digest not in known for turn in teaching):
        raise VectorMissing
    with_baselines = iter(estimate(members, estimator, teaching, known))
    return [turn if turn.note else next(with_baselines) for turn in found]


def estimate(
    members: Rewarded, estimator: Estimator, turns: Sequence[GradedTurn], known: Mapping[bytes, bytes]
) -> list[GradedTurn]:
    """Give each of these turns, all of which can teach, its baseline from the others."""
    by_id = members.by_id
    tasks = [
        turn_task(
            by_id[turn.rollout_id], turn.features, np.frombuffer(known[turn.digest], "<f4"), turn=turn.turn
        )
        for turn in turns
    ]
    rewards = np.array([turn.reward for turn in turns], dtype=np.float64)
    values = turn_baselines(estimator, Scored(tasks, rewards))
    return [replace(turn, baseline=value) for turn, value in zip(turns, values.tolist(), strict=True)]


def store(connection: Connection, batch_id: int, turns: Sequence[GradedTurn]) -> None:
    """Insert the turns of a batch just formed."""
    columns = ("rollout_id", "turn", "reward", "baseline", "advantage", "note")
    values = {name: [getattr(turn, name) for turn in turns] for name in columns}
    grades = [str(turn.grade_ids) for turn in turns]  # a list of integers is its own JSON
    if turns:
        connection.execute(_STORE, {"batch": batch_id, **values, "grade_ids": grades})
