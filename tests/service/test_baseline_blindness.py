"""The baseline never sees the rollout it scores: not its reward, not its response.

From posted documents to b_i, through the same features, digests and estimators that assembly uses.
"""

from typing import Any

import numpy as np
import orjson
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from service.baselines.estimators import Scored
from service.baselines.features import Task, TaskFeatures
from service.baselines.selection import Selection
from service.batches import assembly
from service.batches.history import Rewarded
from service.ingest import rollouts
from service.ingest.formats import native
from service.policies import PolicySettings
from service.schemas import Trace
from tests.training_ground import HashingEncoder

ENCODER = HashingEncoder()
PROMPTS = ["add 1 and 2", "capital of France", "reverse 'abc'", "add 7 and 5", ""]


def task_of(document: dict[str, Any]) -> Task:
    """What the scheduler makes of a posted document."""
    new = rollouts.prepare(native.validate(Trace, document), b"{}", policy_id=1, policy="support", key=b"key")
    written = new.columns()
    stored = orjson.loads(zstandard.ZstdDecompressor().decompress(written.features))
    features = TaskFeatures(**stored)
    packed = written.prompt_digests
    return Task(
        features=features,
        embedding=ENCODER.encode([features.text])[0],
        task_key=written.task_key,
        session_id=new.session_id,
        content_hash=written.content_digest,
        opening_hash=written.opening_digest,
        prompt_hashes=frozenset(packed[at : at + 32] for at in range(0, len(packed), 32)),
        depth=0,
    )


def document(number: int, prompt: str, response: str) -> dict[str, Any]:
    return {
        "trace_id": f"t{number}",
        "policy_version": 0,
        "messages": [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": response},
        ],
        "context": {"workflow": prompt[:3], "number": number},
    }


rewards = st.floats(0, 1, allow_nan=False)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[float], int]:
    count = draw(st.integers(2, 12))
    documents = [
        document(number, draw(st.sampled_from(PROMPTS)), draw(st.text("abc ", max_size=8)))
        for number in range(count)
    ]
    return documents, draw(st.lists(rewards, min_size=count, max_size=count)), draw(st.integers(1, count - 1))


def baselines(
    documents: list[dict[str, Any]], values: list[float], size: int, estimator: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """b of the first `size` documents, the others being history."""
    policy = PolicySettings.model_validate(
        {"base_model": "x", "baseline": {"estimator": estimator, "minimum_history": 0}}
    )
    tasks = [task_of(each) for each in documents]
    scored = np.array(values)
    members = Rewarded(list(range(size)), Scored(tasks[:size], scored[:size]))
    past = Rewarded(list(range(size, len(tasks))), Scored(tasks[size:], scored[size:]))
    return assembly.estimate(policy, Selection(), members, past).values


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(), other=rewards, estimator=st.sampled_from(["auto", "embedding_softmax", "leave_one_out"])
)
def test_changing_its_reward_leaves_its_baseline_bit_identical(
    batch: tuple[list[dict[str, Any]], list[float], int], other: float, estimator: str
) -> None:
    documents, values, size = batch
    before = baselines(documents, values, size, estimator)
    for member in range(size):
        changed = [*values[:member], other, *values[member + 1 :]]
        after = baselines(documents, changed, size, estimator)
        assert before[member].tobytes() == after[member].tobytes()


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(),
    response=st.text("xyz", min_size=9, max_size=40),
    estimator=st.sampled_from(["auto", "embedding_softmax", "leave_one_out"]),
)
def test_changing_its_response_leaves_its_baseline_bit_identical(
    batch: tuple[list[dict[str, Any]], list[float], int], response: str, estimator: str
) -> None:
    documents, values, size = batch
    before = baselines(documents, values, size, estimator)
    for member in range(size):
        prompt = documents[member]["messages"][1]["content"]
        changed = [*documents[:member], document(member, prompt, response), *documents[member + 1 :]]
        after = baselines(changed, values, size, estimator)
        assert before[member].tobytes() == after[member].tobytes()
