"""Many schedulers, many policies, partial batches, back-pressure, promotion that lags behind."""

import threading

import pytest
from sqlalchemy import Engine, text

from service.batches.locks import ASSEMBLY, try_lock
from service.batches.outlook import outlook
from service.batches.scheduler import Scheduler
from service.database import engine as database
from service.database.engine import transaction
from tests.service.batches.ground import Ground, make_ground
from tests.training_ground import HashingEncoder


def graded(ground: Ground, count: int, *, start: int = 0) -> None:
    for number in range(start, start + count):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", (number % 3) / 2)


def blocked_by(ground: Ground) -> str:
    with ground.connection() as connection:
        return outlook(connection, ground.policy_id).blocked_by


def test_each_policy_gets_one_batch_a_look_however_much_another_has(engine: Engine) -> None:
    greedy = make_ground(engine, batching={"size": 2, "max_ready_batches": 100})
    modest = make_ground(engine)
    graded(greedy, 12)
    graded(modest, 2)
    assert Scheduler(engine, HashingEncoder(), interval_seconds=1).tick() == 2
    assert len(modest.rows("SELECT 1 FROM batches WHERE policy_id = :policy")) == 1


def test_a_policy_whose_settings_cannot_be_read_costs_the_others_nothing(engine: Engine) -> None:
    broken, sound = make_ground(engine), make_ground(engine)
    graded(sound, 2)
    with broken.connection() as connection:
        connection.execute(
            text("UPDATE settings_revisions SET document = '{}' WHERE policy_id = :id"),
            {"id": broken.policy_id},
        )
    assert Scheduler(engine, HashingEncoder(), interval_seconds=1).tick() == 1


def test_two_schedulers_at_once_form_no_rollout_twice_and_no_batch_too_many(engine: Engine) -> None:
    ground = make_ground(engine, batching={"size": 2, "max_ready_batches": 3})
    graded(ground, 12)
    barrier = threading.Barrier(4)

    def schedule() -> None:
        barrier.wait(30)
        for _ in range(4):
            ground.form()

    threads = [threading.Thread(target=schedule) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ground.form(), ground.form(), ground.form()
    assert len(ground.rows("SELECT 1 FROM batches WHERE policy_id = :policy AND state = 'ready'")) == 3
    assert len(ground.rows("SELECT 1 FROM rollouts WHERE policy_id = :policy AND state = 'batched'")) == 6


def test_a_scheduler_that_dies_holding_the_lock_stops_nobody(engine: Engine, database_url: str) -> None:
    ground = make_ground(engine)
    graded(ground, 2)
    doomed = database.connect(database_url, name="doomed")
    connection = doomed.connect()
    assert try_lock(connection, ASSEMBLY, ground.policy_id)
    assert ground.form() == 0
    with transaction(engine) as other:
        other.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'yoro doomed'"
            )
        )
    for _ in range(500):
        if ground.form():
            break
        threading.Event().wait(0.01)
    else:
        pytest.fail("the dead scheduler's lock is still there")
    connection.invalidate()
    connection.close()
    doomed.dispose()


def test_a_partial_batch_goes_once_its_oldest_rollout_has_waited_long_enough(engine: Engine) -> None:
    ground = make_ground(engine, batching={"size": 4, "min_size": 3, "max_wait_seconds": 100})
    graded(ground, 2)
    ground.pass_time(200)
    assert blocked_by(ground) == "needs 2 more rewarded tasks"
    graded(ground, 1, start=2)
    assert ground.form() == 1
    ((size,),) = ground.rows("SELECT size FROM batches WHERE policy_id = :policy")
    assert size == 3


def test_rollouts_of_one_task_never_share_a_batch_and_do_not_hide_other_tasks(engine: Engine) -> None:
    ground = make_ground(engine, batching={"size": 3})
    for number in range(30):
        ground.trace(f"same{number}", task="the same")
        ground.grade(f"same{number}", number % 2)
    assert blocked_by(ground) == "needs 2 more rewarded tasks"
    graded(ground, 2)
    assert ground.form() == 1


def test_assembly_pauses_while_enough_batches_wait_for_the_trainer(engine: Engine) -> None:
    ground = make_ground(engine)
    graded(ground, 4)
    assert [ground.form(), ground.form()] == [1, 0]
    assert blocked_by(ground) == "1 batch(es) wait for the trainer"


def test_with_manual_promotion_training_stops_ahead_of_what_serves(engine: Engine) -> None:
    ground = make_ground(engine, promotion={"mode": "manual", "max_ahead_of_promoted": 2})
    graded(ground, 6)
    assert [ground.form(), ground.train(), ground.form(), ground.train(), ground.form()] == [1, 1, 1, 2, 0]
    assert blocked_by(ground).startswith("training is 2 version(s) ahead of version 0")
    ((promoted,),) = ground.rows("SELECT promoted_version FROM lineages WHERE policy_id = :policy")
    assert promoted == 0


def test_a_batch_without_any_signal_is_recorded_and_makes_no_step(engine: Engine) -> None:
    ground = make_ground(engine)
    for trace_id in ("t0", "t1"):
        ground.trace(trace_id)
        ground.grade(trace_id, 0.5)
    assert ground.form() == 1
    assert ground.rows("SELECT state, outcome FROM batches WHERE policy_id = :policy") == [
        ("no_step", "no_signal")
    ]
    assert set(ground.states().values()) == {("excluded", "no_signal")}


def test_stale_rollouts_are_counted_as_such_and_a_wider_limit_takes_them_back(engine: Engine) -> None:
    ground = make_ground(engine, batching={"size": 2, "max_staleness": 0})
    graded(ground, 3)
    assert [ground.form(), ground.train()] == [1, 1]
    graded(ground, 1, start=3)
    assert blocked_by(ground) == "needs 2 more rewarded tasks"
    ground.revise(batching={"max_staleness": 1})
    assert ground.form() == 1
