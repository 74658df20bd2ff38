"""Rolling back: the pointer alone, or the trainer too. Two operations, two records."""

import pytest
from sqlalchemy import text

from service.adapters import pointers
from service.adapters.pointers import Moved
from service.batches import claims, leases
from service.batches.rewind import Rewound, rewind
from service.database import policies
from service.database.engine import transaction
from service.errors import Conflict, LeaseLost
from tests import training_ground
from tests.service.adapters.lineage import Lineage
from tests.training_ground import BATCH


def go_back(lineage: Lineage, version: int) -> Rewound:
    with transaction(lineage.engine) as connection:
        return rewind(connection, lineage.id, version, reason="rewind by test")


def roll_back(lineage: Lineage, version: int, *, force: bool = False) -> Moved:
    with transaction(lineage.engine) as connection:
        return pointers.roll_back(connection, lineage.id, version, reason="rollback by test", force=force)


def promote(lineage: Lineage, version: int) -> Moved:
    with transaction(lineage.engine) as connection:
        return pointers.promote(connection, lineage.id, version, reason="promote by test")


def test_a_rollback_of_the_pointer_leaves_the_trainer_alone_and_holds_until_a_promotion(
    lineage: Lineage,
) -> None:
    lineage.step(), lineage.step()
    lineage.form_batch()
    lease, batch = lineage.claim()
    assert roll_back(lineage, 1) == Moved(before=2, after=1)
    assert lineage.commit(lease, batch) == 3  # what was being trained goes on
    row = lineage.row()
    assert (row.head_version, row.promoted_version, row.promotion_held) == (3, 1, True)
    assert promote(lineage, 3) == Moved(before=1, after=3)
    assert lineage.step(3) == 4
    assert lineage.row().promoted_version == 4


def test_a_rollback_goes_back_only(lineage: Lineage) -> None:
    lineage.step(), lineage.step()
    roll_back(lineage, 1)
    with pytest.raises(Conflict) as refused:
        roll_back(lineage, 2)
    assert refused.value.code == "not_older"


def test_a_rewind_puts_the_head_back_and_new_versions_keep_counting_up(lineage: Lineage) -> None:
    for _ in range(4):
        lineage.step()
    token = lineage.row().fencing_token
    assert go_back(lineage, 2).off_branch == [3, 4]
    row = lineage.row()
    assert (row.head_version, row.head_depth, row.promoted_version, row.next_version) == (2, 2, 2, 5)
    assert row.fencing_token == token + 1
    assert lineage.step(2) == 5
    made = lineage.versions()[5]
    assert (made.parent, made.depth) == (2, 3)


def test_what_was_being_trained_when_the_rewind_came_cannot_commit(lineage: Lineage) -> None:
    for _ in range(2):
        lineage.step()
    lineage.form_batch()
    lease, batch = lineage.claim()
    go_back(lineage, 1)
    with pytest.raises(LeaseLost):
        lineage.commit(lease, batch)
    with pytest.raises(LeaseLost):
        leases.heartbeat(lineage.engine, lease, 30.0, "training")
    assert lineage.row().head_version == 1
    assert training_ground.form_batches(lineage.engine) == 1  # of the same rollouts: nothing is lost
    assert lineage.commit(*lineage.claim()) == 3


def test_a_rewind_dissolves_ready_batches_claimed_or_not(lineage: Lineage) -> None:
    lineage.step()
    for _ in range(2):
        lineage.form_batch()
    lineage.claim()
    assert go_back(lineage, 0).dissolved_batches == [2, 3]
    with transaction(lineage.engine) as connection:
        ended = connection.execute(text("SELECT state, outcome FROM batches ORDER BY number")).all()
        live = connection.execute(text("SELECT count(*) FROM batch_members WHERE live")).scalar_one()
    assert [tuple(row) for row in ended] == [
        ("trained", ""),
        ("dissolved", "rewound"),
        ("dissolved", "rewound"),
    ]
    assert live == BATCH
    # sampled from version 0, which is on the branch: ready again, and a batch at once
    assert training_ground.form_batches(lineage.engine) == 2


def test_rollouts_of_versions_rewound_away_are_off_branch_and_come_back_with_their_branch(
    lineage: Lineage,
) -> None:
    for _ in range(3):
        lineage.step()
    ready = lineage.add_rollouts(2, version=3)
    kept = lineage.add_rollouts(1, version=1)
    go_back(lineage, 1)
    late = lineage.add_rollouts(1, version=2)  # sampled before, arrived after
    states = lineage.states()
    assert {states[trace] for trace in [*ready, *late]} == {("excluded", "off_branch")}
    assert states[kept[0]] == ("ready", "")
    back = go_back(lineage, 3)
    assert (back.off_branch, back.back_on_branch) == ([], [2, 3])
    states = lineage.states()
    assert {states[trace] for trace in [*ready, *late, *kept]} == {("ready", "")}


def test_members_of_a_dissolved_batch_that_lost_their_branch_are_off_branch(lineage: Lineage) -> None:
    for _ in range(2):
        lineage.step()
    lineage.form_batch(version=2)
    go_back(lineage, 1)
    counted = [state for state in lineage.states().values() if state == ("excluded", "off_branch")]
    assert len(counted) == BATCH


def test_what_was_trained_on_the_abandoned_branch_stays_trained(lineage: Lineage) -> None:
    for _ in range(2):
        lineage.step()
    go_back(lineage, 0)
    assert {state for state, _ in lineage.states().values()} == {"trained"}


def test_an_approval_stands_as_long_as_what_was_approved_is_on_the_branch(lineage: Lineage) -> None:
    with transaction(lineage.engine) as connection:
        policies.revise(connection, lineage.id, {"promotion": {"mode": "manual"}})
    for _ in range(3):
        lineage.step()
    promote(lineage, 1)
    go_back(lineage, 2)
    assert lineage.row().promoted_version == 1
    go_back(lineage, 0)
    assert lineage.row().promoted_version == 0


def test_a_version_rewound_away_is_not_promoted(lineage: Lineage) -> None:
    for _ in range(2):
        lineage.step()
    go_back(lineage, 1)
    with pytest.raises(Conflict) as refused:
        promote(lineage, 2)
    assert refused.value.code == "version_rewound"


def test_a_tainted_version_is_promoted_only_by_force(lineage: Lineage) -> None:
    for _ in range(2):
        lineage.step()
    with transaction(lineage.engine) as connection:
        connection.execute(text("UPDATE policy_versions SET tainted = '{erased}' WHERE version = 1"))
    with pytest.raises(Conflict) as refused:
        roll_back(lineage, 1)
    assert refused.value.code == "version_tainted"
    assert roll_back(lineage, 1, force=True).after == 1


def test_every_move_is_recorded_with_its_reason(lineage: Lineage) -> None:
    for _ in range(2):
        lineage.step()
    roll_back(lineage, 1)
    go_back(lineage, 1)
    with transaction(lineage.engine) as connection:
        found = pointers.moves(connection, lineage.id, before=2**62, limit=50)
    assert [(move["pointer"], move["from"], move["to"], move["reason"]) for move in found] == [
        ("latest", 2, 1, "rewind by test"),
        ("promoted", 2, 1, "rollback by test"),
        ("promoted", 1, 2, "step"),
        ("latest", 1, 2, "step"),
        ("promoted", 0, 1, "step"),
        ("latest", 0, 1, "step"),
    ]


def test_training_waits_when_a_held_pointer_lags_too_far_behind(lineage: Lineage) -> None:
    for _ in range(4):
        lineage.step()
    roll_back(lineage, 0)
    lineage.add_rollouts(BATCH, version=0)
    assert training_ground.form_batches(lineage.engine) == 0
    promote(lineage, 4)
    assert training_ground.form_batches(lineage.engine) == 1


def test_a_claim_after_a_rewind_starts_from_the_new_head(lineage: Lineage) -> None:
    for _ in range(3):
        lineage.step()
    go_back(lineage, 1)
    lineage.form_batch(version=1)
    _, batch = lineage.claim()
    assert (batch.head.version, batch.head.depth, batch.head.next_version) == (1, 1, 4)
    assert set(batch.folders) >= {1}
    assert isinstance(batch, claims.ClaimedBatch)
