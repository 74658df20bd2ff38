"""What goes from the store and what must not: orphans, retention, and their races."""

from pathlib import Path

import pytest
from sqlalchemy import text

from service.adapters import pointers, retention
from service.adapters.retention import Rule
from service.adapters.store import MANIFEST
from service.batches.rewind import rewind
from service.database.engine import transaction
from service.errors import Conflict
from tests.service.adapters.lineage import NAME, Lineage, folder_of, make_lineage

STRICT = Rule(keep=1, rewindable=0, younger_seconds=0)


@pytest.fixture
def lineage(engine: object, store: object, tmp_path: Path) -> Lineage:
    return make_lineage(
        engine, store, tmp_path / "sources", batching={"size": 4, "max_ready_batches": 9, "max_staleness": 0}
    )  # type: ignore[arg-type]


def collect(lineage: Lineage, rule: Rule = STRICT, *, dry_run: bool = False) -> list[str]:
    return list(retention.collect(lineage.engine, lineage.store, rule, dry_run=dry_run))


def grow(lineage: Lineage, steps: int) -> None:
    for _ in range(steps):
        lineage.step(lineage.row().head_version)


def numbers(folders: list[str]) -> list[int]:
    return [int(folder.split("/v")[1].split("-")[0]) for folder in folders]


def kept(lineage: Lineage) -> list[int]:
    return numbers(lineage.store.folders(NAME))


def test_old_versions_go_and_the_head_the_promoted_and_the_pinned_stay(lineage: Lineage) -> None:
    grow(lineage, 5)
    with transaction(lineage.engine) as connection:
        pointers.pin(connection, lineage.id, 1, pinned=True)
        pointers.roll_back(connection, lineage.id, 3, reason="test")
    assert numbers(collect(lineage, dry_run=True)) == [2, 4]
    assert kept(lineage) == [1, 2, 3, 4, 5]
    assert numbers(collect(lineage)) == [2, 4]
    assert kept(lineage) == [1, 3, 5]
    assert collect(lineage) == []


def test_ancestors_that_a_rewind_may_need_stay_whatever_branch_is_newest(lineage: Lineage) -> None:
    grow(lineage, 4)
    with transaction(lineage.engine) as connection:
        rewind(connection, lineage.id, 2, reason="test")
    grow(lineage, 1)  # 5, of parent 2
    collect(lineage, Rule(keep=1, rewindable=1, younger_seconds=0))
    assert kept(lineage) == [2, 3, 4, 5]  # 3 and 4 are as deep as what may still be trained
    grow(lineage, 2)
    collect(lineage, Rule(keep=1, rewindable=1, younger_seconds=0))
    assert kept(lineage) == [6, 7]


def test_a_version_that_an_open_rollout_was_sampled_from_stays(lineage: Lineage) -> None:
    grow(lineage, 3)
    lineage.add_rollouts(1, version=1)
    collect(lineage)
    assert kept(lineage) == [1, 3]


def test_young_versions_stay(lineage: Lineage) -> None:
    grow(lineage, 3)
    assert collect(lineage, Rule(keep=1, rewindable=0, younger_seconds=3600)) == []


def test_a_version_whose_files_are_gone_takes_no_pointer_and_is_not_claimed(lineage: Lineage) -> None:
    grow(lineage, 3)
    collect(lineage)
    with transaction(lineage.engine) as connection:
        for move in (pointers.roll_back, rewind):
            with pytest.raises(Conflict) as refused:
                move(connection, lineage.id, 1, reason="test")
            assert refused.value.code == "version_gone"
    lineage.settings = lineage.settings.model_copy()
    with transaction(lineage.engine) as connection:
        connection.execute(
            text(
                "UPDATE settings_revisions"
                " SET document = jsonb_set(document, '{batching,max_staleness}', '9')"
            )
        )
    lineage.form_batch(version=1)
    _, batch = lineage.claim()
    assert set(batch.folders) == {3}  # the trainer's verdict is version_gone


def test_a_removal_that_was_interrupted_is_finished(lineage: Lineage) -> None:
    grow(lineage, 3)
    assert retention.give_up(lineage.engine, lineage.id, STRICT) == [1, 2]
    assert kept(lineage) == [1, 2, 3]  # killed here
    assert numbers(collect(lineage)) == [1, 2]
    assert kept(lineage) == [3]


def test_only_folders_without_a_row_and_with_an_old_token_are_orphans(lineage: Lineage) -> None:
    grow(lineage, 1)
    lineage.form_batch(version=1)
    lease, batch = lineage.claim()
    lineage.write(2, f"{NAME}/v2-{lease.token}-7", 1)  # an attempt of whoever holds the token
    lineage.write(2, f"{NAME}/v2-{lease.token - 1}-1", 1)  # one that no commit can claim any more
    root = folder_of(lineage.store)
    (root / NAME / "notes").mkdir()  # not ours
    assert collect(lineage) == [f"{NAME}/v2-{lease.token - 1}-1"]
    assert lineage.commit(lease, batch) == 2
    assert (root / NAME / "notes").is_dir()


def test_a_folder_without_a_manifest_is_nobody_s_once_its_token_is_old(lineage: Lineage) -> None:
    lineage.form_batch()
    lease, _ = lineage.claim()
    published = lineage.write(1, f"{NAME}/v1-{lease.token}-1", 0)
    lineage.store._files.rm_file(f"{lineage.store._root}/{published.folder}/{MANIFEST}")  # torn
    assert collect(lineage) == []
    lineage.claim()
    assert collect(lineage) == [published.folder]
