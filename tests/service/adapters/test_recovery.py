"""Disaster recovery: what docs/ops.md says to back up is enough, and no number is used twice after it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url

from service.adapters import recovery
from service.adapters.store import AdapterStore
from service.database import engine as database
from service.database.engine import transaction
from tests.service.adapters.lineage import NAME, Lineage, folder_of


@pytest.fixture
def restored(engine: Engine, database_url: str, lineage: Lineage, tmp_path: Path) -> Iterator[Engine]:
    """Two versions are backed up, a third is published and lost with the machine; the backup comes back."""
    folder = folder_of(lineage.store)
    lineage.step(), lineage.step()
    name = make_url(database_url).database
    admin = create_engine(make_url(database_url).set(database="postgres"), isolation_level="AUTOCOMMIT")
    engine.dispose()
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}_backup TEMPLATE {name}"))  # the database first,
    lineage.step()
    shutil.copytree(folder, tmp_path / "backup")  # then the store, which may be ahead
    made = database.connect(
        make_url(database_url).set(database=f"{name}_backup").render_as_string(False), name="restored"
    )
    yield made
    made.dispose()
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name}_backup WITH (FORCE)"))
    admin.dispose()


def test_a_restored_installation_serves_its_versions_and_never_reuses_a_number(
    restored: Engine, lineage: Lineage, tmp_path: Path
) -> None:
    store = AdapterStore(str(tmp_path / "backup"))
    with transaction(restored) as connection:
        (found,) = recovery.recover(connection, store)
    assert (found.policy, found.next_version, found.missing) == (NAME, 4, [])
    again = Lineage(restored, store, tmp_path / "again", lineage.settings, lineage.id)
    for version, row in again.versions().items():
        if version:
            store.download(row.folder, tmp_path / "got" / str(version), manifest_sha256=row.manifest_sha256)
    assert again.row().head_version == 2
    for _ in range(100):
        next(again._tasks)  # tasks that were not there before
    assert again.step(2) == 4  # 3 was published once, and may have been pulled


def test_versions_whose_files_did_not_come_back_are_named(
    restored: Engine, lineage: Lineage, tmp_path: Path
) -> None:
    store = AdapterStore(str(tmp_path / "backup"))
    store.delete(lineage.versions()[1].folder)
    with transaction(restored) as connection:
        (found,) = recovery.recover(connection, store)
    assert found.missing == [1]
