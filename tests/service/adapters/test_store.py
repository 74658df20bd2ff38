"""The store on a local folder, in memory and on S3: create-only, manifest last, damage found on read."""

import itertools
from pathlib import Path

import fsspec
import pytest

from service.adapters.archive import archive
from service.adapters.store import MANIFEST, AdapterStore, StoredFile
from service.errors import AdapterRejected, Conflict, NotFound
from tests.service.adapters import lineage as lineages
from tests.service.adapters.lineage import Lineage

_numbers = itertools.count()


@pytest.fixture(params=["memory", "folder", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterStore:
    if request.param == "folder":
        return AdapterStore(str(tmp_path / "store"))
    root = "memory:/" if request.param == "memory" else request.getfixturevalue("bucket")
    return AdapterStore(f"{root}/adapters-{next(_numbers)}")


@pytest.fixture
def folder(any_store: AdapterStore, tmp_path: Path) -> str:
    write(any_store, tmp_path, "tiny/v1-1-1")
    return "tiny/v1-1-1"


def write(store: AdapterStore, scratch: Path, folder: str, version: int = 1) -> str:
    maker = Lineage(None, store, scratch / "sources", None, 0)  # type: ignore[arg-type]
    return maker.write(version, folder, version - 1).manifest_sha256


def spoil(store: AdapterStore, folder: str, name: str, body: bytes) -> None:
    store._files.makedirs(f"{store._root}/{folder}", exist_ok=True)
    with store._files.open(f"{store._root}/{folder}/{name}", "wb") as out:
        out.write(body)


def entry(store: AdapterStore, folder: str, name: str = "adapter_model.safetensors") -> StoredFile:
    manifest, _ = store.read_manifest(folder)
    return next(StoredFile(**each) for each in manifest["files"] if each["name"] == name)


def test_a_version_comes_back_as_it_went_in(any_store: AdapterStore, folder: str, tmp_path: Path) -> None:
    manifest = any_store.download(folder, tmp_path / "got")
    assert manifest["version"] == 1
    assert sorted(path.name for path in (tmp_path / "got").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert any_store.folders("tiny") == [folder]


def test_a_folder_is_never_written_twice(any_store: AdapterStore, folder: str, tmp_path: Path) -> None:
    with pytest.raises(Conflict):
        write(any_store, tmp_path / "again", folder)


def test_a_file_is_created_or_refused_never_overwritten(any_store: AdapterStore, folder: str) -> None:
    with pytest.raises(Conflict):
        any_store._put(f"{any_store._root}/{folder}/{MANIFEST}", b"{}")


@pytest.mark.parametrize("damage", ["truncated", "longer", "flipped", "empty"])
def test_damage_is_found_on_read(damage: str, any_store: AdapterStore, folder: str, tmp_path: Path) -> None:
    name = "adapter_model.safetensors"
    body = b"".join(any_store.read(folder, name))
    any_store.vouch(folder, entry(any_store, folder))
    bad = {"truncated": body[:-1], "longer": body + b"x", "flipped": body[:-1] + b"!", "empty": b""}[damage]
    spoil(any_store, folder, name, bad)
    with pytest.raises(AdapterRejected) as refused:
        any_store.vouch(folder, entry(any_store, folder))
    assert refused.value.code == "torn_file"
    with pytest.raises(AdapterRejected):
        any_store.download(folder, tmp_path / "got")


def test_a_folder_swapped_for_another_is_found_by_the_registry_s_digest(
    any_store: AdapterStore, folder: str, tmp_path: Path
) -> None:
    _, digest = any_store.read_manifest(folder)
    write(any_store, tmp_path / "other", "tiny/v2-1-1", version=2)
    for name in (MANIFEST, "adapter_model.safetensors", "adapter_config.json"):
        spoil(any_store, folder, name, b"".join(any_store.read("tiny/v2-1-1", name)))
    any_store.download(folder, tmp_path / "fooled")  # consistent in itself
    with pytest.raises(AdapterRejected) as refused:
        any_store.download(folder, tmp_path / "got", manifest_sha256=digest)
    assert refused.value.code == "swapped_manifest"


def test_ranges_of_a_file(any_store: AdapterStore, folder: str) -> None:
    name = "adapter_config.json"
    body = b"".join(any_store.read(folder, name))
    assert b"".join(any_store.read(folder, name, 3, 9)) == body[3:9]
    assert b"".join(any_store.read(folder, name, 3)) == body[3:]


def test_a_missing_file_is_not_found(any_store: AdapterStore, folder: str) -> None:
    with pytest.raises(NotFound):
        any_store.read(folder, "nothing")
    with pytest.raises(NotFound):
        any_store.vouch(folder, StoredFile("nothing", 0, ""))


def test_an_interrupted_removal_leaves_nothing_that_looks_whole(any_store: AdapterStore, folder: str) -> None:
    any_store.delete(folder)
    any_store.delete(folder)
    assert any_store.folders("tiny") == []


def test_any_range_of_the_archive_is_that_of_the_whole(any_store: AdapterStore, folder: str) -> None:
    manifest = b"".join(any_store.read(folder, MANIFEST))
    files = [entry(any_store, folder, name) for name in ("adapter_model.safetensors", "adapter_config.json")]
    made = archive(folder, "tiny-v1", manifest, files)
    whole = b"".join(made.read(any_store, 0, made.size))
    assert len(whole) == made.size
    for start, stop in ((0, 1), (511, 513), (700, 1900), (made.size - 5, made.size)):
        assert b"".join(made.read(any_store, start, stop)) == whole[start:stop]
    assert lineages.NAME == "tiny"


def test_a_torn_upload_is_nobody_s_and_can_be_removed(any_store: AdapterStore, tmp_path: Path) -> None:
    spoil(any_store, "tiny/v3-1-1", "adapter_model.safetensors", b"half of i")
    assert any_store.folders("tiny") == ["tiny/v3-1-1"]
    with pytest.raises(NotFound):
        any_store.download("tiny/v3-1-1", tmp_path / "got")
    with pytest.raises(Conflict):
        write(any_store, tmp_path, "tiny/v3-1-1", version=3)
    any_store.delete("tiny/v3-1-1")
    assert any_store.folders("tiny") == []


def test_what_another_process_wrote_and_removed_is_seen(any_store: AdapterStore, tmp_path: Path) -> None:
    root = any_store._files.unstrip_protocol(any_store._root)
    fsspec.filesystem(fsspec.utils.get_protocol(root)).clear_instance_cache()
    other = AdapterStore(root)
    assert other.folders("tiny") == []
    write(any_store, tmp_path, "tiny/v1-1-1")
    assert other.folders("tiny") == ["tiny/v1-1-1"]
    other.vouch("tiny/v1-1-1", entry(other, "tiny/v1-1-1"))
    any_store.delete("tiny/v1-1-1")
    with pytest.raises(NotFound):
        other.vouch("tiny/v1-1-1", StoredFile("adapter_model.safetensors", 0, ""))
    with pytest.raises(NotFound):
        other.read("tiny/v1-1-1", MANIFEST)
