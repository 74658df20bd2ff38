"""Order and repetition of arrival change nothing."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from tests.service.batches.ground import Ground, make_ground

TRACES = ["t0", "t1", "t2"]
grades = st.lists(
    st.tuples(
        st.sampled_from(TRACES), st.sampled_from(["a", "b"]), st.sampled_from([0.0, 0.25, 1.0, None]),
        st.integers(0, 9),
    ),
    max_size=6, unique_by=lambda grade: (grade[0], grade[1], grade[3]),
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(grades=grades, posted=st.sets(st.sampled_from(TRACES)), data=st.data())
def test_every_order_of_arrival_with_repetitions_ends_the_same(
    engine: Engine, grades: list[tuple[Any, ...]], posted: set[str], data: st.DataObject
) -> None:
    """Revisions carry `graded_at` and differ in it: the exceptions are those without, or with equal ones."""
    documents: list[tuple[Any, ...]] = [*grades, *((trace_id,) for trace_id in sorted(posted))]
    again = data.draw(st.permutations(documents + data.draw(st.lists(st.sampled_from(documents or [()])))))
    assert _outcome(engine, documents) == _outcome(engine, [each for each in again if each])


def _outcome(engine: Engine, documents: list[tuple[Any, ...]]) -> list[Any]:
    ground: Ground = make_ground(engine, reward={"rule": "latest"})
    for document in documents:
        if len(document) == 1:
            ground.trace(document[0], messages=[{"role": "user", "content": document[0]}])
        else:
            trace_id, grader, value, minute = document
            ground.grade(trace_id, value, grader, graded_at=f"2020-01-01T00:0{minute}:00Z")
    rollouts = ground.rows(
        "SELECT trace_id, state, reason, reward FROM rollouts WHERE policy_id = :policy ORDER BY 1"
    )
    current = ground.rows(
        "SELECT r.trace_id, g.grader, g.value, g.graded_at"
        " FROM grades g JOIN rollouts r ON r.id = g.rollout_id"
        " WHERE r.policy_id = :policy AND g.current ORDER BY 1, 2"
    )
    return [*rollouts, *current]
