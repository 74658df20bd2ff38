"""Reading history: a scheduler that knows the last window reads the next one as one that knows nothing."""

from datetime import UTC, datetime

import numpy as np
from sqlalchemy import Engine, text

from service.batches import history
from service.batches.history import Rewarded
from service.database.engine import transaction
from tests.training_ground import HashingEncoder, prepare_batches


def test_known_tasks_give_the_same_window_with_the_rewards_of_now(engine: Engine) -> None:
    policy = prepare_batches(engine, 2)
    first = _window(engine, policy)
    with transaction(engine) as connection:
        connection.execute(text("UPDATE rollouts SET reward = 1 - reward WHERE trace_id = 't0003'"))
    again, afresh = _window(engine, policy, known=first), _window(engine, policy)

    assert again.ids == afresh.ids == first.ids
    assert all(a is b for a, b in zip(again.scored.tasks, first.scored.tasks, strict=True))
    assert np.array_equal(again.scored.rewards, afresh.scored.rewards)
    assert not np.array_equal(again.scored.rewards, first.scored.rewards)
    for one, other in zip(again.scored.tasks, afresh.scored.tasks, strict=True):
        assert one.features == other.features
        assert np.array_equal(one.embedding, other.embedding)


def test_what_lost_its_reward_or_was_erased_since_the_look_is_left_out(engine: Engine) -> None:
    policy = prepare_batches(engine, 2)
    first = _window(engine, policy)
    with transaction(engine) as connection:
        connection.execute(text("UPDATE rollouts SET reward = NULL WHERE trace_id = 't0001'"))
        connection.execute(text("UPDATE rollouts SET erased_at = now() WHERE trace_id = 't0002'"))
        gone = connection.execute(
            text("SELECT id FROM rollouts WHERE trace_id IN ('t0001', 't0002')")
        ).scalars().all()  # fmt: skip
        read = history.load(connection, first.ids, HashingEncoder.name, first.by_id)

    assert read.ids == [id_ for id_ in first.ids if id_ not in gone]
    assert np.isfinite(read.scored.rewards).all()


def _window(engine: Engine, policy: int, known: Rewarded | None = None) -> Rewarded:
    with transaction(engine) as connection:
        ids = history.window(connection, policy, cutoff=datetime.now(UTC), members=[], limit=100)
        return history.load(
            connection, ids, HashingEncoder.name, known.by_id if known else history.NOTHING_KNOWN
        )
