"""The baseline of a turn never sees its reward, its message or anything that came after it.

Twice: from posted documents through the same functions that assembly uses, for many documents; and
through the database, as stored with a batch.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from service.baselines.estimators import Scored
from service.baselines.selection import Selection
from service.baselines.turns import features_before, text_digest
from service.batches import choices, turns
from service.batches.history import Rewarded
from service.batches.turns import GradedTurn
from service.ingest.formats import native
from service.policies import Baseline
from service.schemas import Trace
from tests.service.batches.ground import make_ground
from tests.service.test_baseline_blindness import ENCODER, task_of

ESTIMATORS = ["auto", "embedding_softmax", "tfidf_softmax", "length_buckets", "leave_one_out"]
Said = list[tuple[str, float]]
"""A rollout's turns: what the policy said, and its reward."""


def document(number: int, said: Said) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"task {number % 3}"}]
    for words, _ in said:
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": "go on"}]
    return {
        "trace_id": f"t{number}", "policy_version": 0, "messages": messages, "context": {"number": number},
    }  # fmt: skip


def baselines(batch: list[Said], estimator: str) -> dict[tuple[int, int], bytes]:
    """The bits of b by rollout and turn."""
    documents = [document(number, said) for number, said in enumerate(batch)]
    members = Rewarded(
        list(range(len(batch))), Scored([task_of(each) for each in documents], np.zeros(len(batch)))
    )
    graded = []
    for number, said in enumerate(batch):
        normalised = native.normalise(native.validate(Trace, documents[number]))
        for at, (_, reward) in enumerate(said):
            features = features_before(normalised, 2 * at + 1)
            graded.append(GradedTurn(number, 2 * at + 1, reward, [], features))
    vectors = {
        text_digest(each.features): ENCODER.encode([each.features.text])[0].tobytes() for each in graded
    }
    chosen = choices.estimator(Baseline(estimator=estimator, minimum_history=0), Selection(), 0)
    made = turns.estimate(members, chosen, graded, vectors)
    return {(each.rollout_id, each.turn): np.float64(each.baseline).tobytes() for each in made}


turn = st.tuples(st.text("abc ", min_size=1, max_size=8), st.floats(0, 1))
rollouts = st.lists(turn, max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    batch=st.lists(rollouts.filter(bool), min_size=2, max_size=8),
    fresh=rollouts,
    said=turn,
    estimator=st.sampled_from(ESTIMATORS),
    data=st.data(),
)
def test_changing_it_and_all_that_follows_leaves_a_turn_s_baseline_bit_identical(
    batch: list[Said], fresh: Said, said: tuple[str, float], estimator: str, data: st.DataObject
) -> None:
    member = data.draw(st.integers(0, len(batch) - 1))
    at = data.draw(st.integers(0, len(batch[member]) - 1))
    before = baselines(batch, estimator)
    changed = [*batch[:member], [*batch[member][:at], said, *fresh], *batch[member + 1 :]]
    after = baselines(changed, estimator)
    # with the turn itself, the earlier ones, to which it is what came after
    for index in range(1, 2 * at + 2, 2):
        assert before[member, index] == after[member, index]


BATCH: list[Said] = [
    [("first", 0.9), ("second", 0.2), ("third", 0.5)],
    [("one", 0.1), ("two", 0.7)],
    [("uno", 0.6), ("due", 0.4), ("tre", 1.0)],
    [("ein", 0.3)],
]


def stored(engine: Engine, estimator: str, batch: list[Said]) -> dict[tuple[int, int], bytes]:
    """The same bits as a batch of a policy of its own has them in the database."""
    ground = make_ground(
        engine, baseline={"estimator": estimator, "minimum_history": 0}, objective={"turn_weight": 0.5},
        batching={"size": len(batch)},
    )  # fmt: skip
    for number, said in enumerate(batch):
        ground.trace(f"t{number}", messages=document(number, said)["messages"])
        for at, (_, reward) in enumerate(said):
            ground.grade(f"t{number}", reward, turn=2 * at + 1)
    for number in range(len(batch)):
        ground.grade(f"t{number}", number % 2)
    assert ground.form() == 1
    rows = ground.rows(
        "SELECT r.trace_id, t.turn, t.baseline FROM batch_turns t JOIN rollouts r ON r.id = t.rollout_id"
        " WHERE r.policy_id = :policy"
    )
    return {(int(row.trace_id[1:]), row.turn): np.float64(row.baseline).tobytes() for row in rows}


@pytest.mark.parametrize("estimator", ["auto", "embedding_softmax", "leave_one_out"])
def test_what_a_batch_stores_is_as_blind(engine: Engine, estimator: str) -> None:
    before = stored(engine, estimator, BATCH)
    assert len(before) == sum(map(len, BATCH))
    for later in ([], [("more", 1.0)] * 4):
        after = stored(engine, estimator, [[BATCH[0][0], ("changed", 0.95), *later], *BATCH[1:]])
        assert [before[0, index] for index in (1, 3)] == [after[0, index] for index in (1, 3)]
        assert before[1, 1] != after[1, 1]  # others do see it
