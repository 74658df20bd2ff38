"""Adapters over HTTP and `yoro pull`: manifests, files, ETags, ranges, and a client that dies midway."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sqlalchemy import Engine, text

from service.adapters.store import AdapterStore, describe_file
from service.database.engine import transaction
from service.settings import Settings
from tests.conftest import Api, MakePolicy, Policy
from yoro import Client
from yoro.pull import PullError, pull

FILES = "/v1/policies/support/adapters"


def publish_version(
    engine: Engine, store: AdapterStore, policy: Policy, version: int, tmp_path: Path
) -> None:
    """Put a version's files and row there, as the trainer's commit does."""
    source = tmp_path / f"source-{version}"
    source.mkdir()
    weights = {"base_model.model.x.lora_A.weight": np.full((4, 64), version, dtype=np.float32)}
    save_file(weights, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "v": version}))
    files = [asdict(describe_file(path)) for path in sorted(source.iterdir())]
    manifest: dict[str, Any] = {"policy": policy.name, "version": version, "files": files, "state": []}
    folder = f"{policy.name}/v{version}-1-1"
    digest = store.write_version(folder, source, manifest)
    with transaction(engine) as connection:
        connection.execute(
            text("""INSERT INTO policy_versions (policy_id, version, parent, depth, fencing_token, folder, manifest,
                                                 manifest_sha256, adapter_sha256)
                    VALUES (:p, :v, :v - 1, :v, 1, :f, CAST(:m AS jsonb), :d, :d)"""),
            {"p": policy.id, "v": version, "f": folder, "m": json.dumps(manifest), "d": digest},
        )
        connection.execute(
            text("UPDATE lineages SET head_version = :v, promoted_version = :v WHERE policy_id = :p"),
            {"v": version, "p": policy.id},
        )


@pytest.fixture
def published(
    engine: Engine, settings: Settings, make_policy: MakePolicy, tmp_path: Path
) -> Iterator[AdapterStore]:
    store = AdapterStore(settings.store_url)
    policy = make_policy()
    for version in (1, 2):
        publish_version(engine, store, policy, version, tmp_path)
    yield store


def test_latest_names_the_head_and_its_files(published: AdapterStore, api: Api) -> None:
    manifest = api.call("ops", "GET", f"{FILES}/latest").json()
    assert (manifest["version"], manifest["parent"], manifest["tainted"]) == (2, 1, [])
    assert {file["name"] for file in manifest["files"]} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }


def test_an_unchanged_pointer_answers_304(published: AdapterStore, api: Api) -> None:
    etag = api.call("ops", "GET", f"{FILES}/latest").headers["etag"]
    assert api.call("ops", "GET", f"{FILES}/latest", headers={"If-None-Match": etag}).status_code == 304
    assert api.call("ops", "GET", f"{FILES}/1", headers={"If-None-Match": etag}).status_code == 200


def test_a_file_comes_whole_by_range_and_not_at_all_if_unchanged(published: AdapterStore, api: Api) -> None:
    path = f"{FILES}/1/files/adapter_model.safetensors"
    whole = api.call("ops", "GET", path)
    entry = next(
        file
        for file in api.call("ops", "GET", f"{FILES}/1").json()["files"]
        if file["name"].endswith("tensors")
    )
    assert whole.headers["etag"] == f'"{entry["sha256"]}"'
    assert len(whole.content) == entry["size"]
    part = api.call("ops", "GET", path, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole.content[10:20])
    unchanged = api.call("ops", "GET", path, headers={"If-None-Match": whole.headers["etag"]})
    assert unchanged.status_code == 304


@pytest.mark.parametrize(
    "name", ["../../../admin.key", "manifest.json", "optimizer.safetensors", "%2e%2e%2fx"]
)
def test_only_files_of_the_manifest_are_served(name: str, published: AdapterStore, api: Api) -> None:
    assert api.call("ops", "GET", f"{FILES}/1/files/{name}").status_code == 404


def test_version_zero_and_unknown_versions_have_no_files(published: AdapterStore, api: Api) -> None:
    assert api.call("ops", "GET", f"{FILES}/0/files/adapter_config.json").status_code == 404
    assert api.call("ops", "GET", f"{FILES}/9").json()["code"] == "version_not_found"
    assert api.call("ops", "GET", f"{FILES}/newest").json()["code"] == "version_not_found"


def test_the_list_pages_from_the_newest(published: AdapterStore, api: Api) -> None:
    first = api.call("ops", "GET", f"{FILES}?limit=1").json()
    second = api.call("ops", "GET", f"{FILES}?limit=1&cursor={first['next_cursor']}").json()
    assert [page["adapters"][0]["version"] for page in (first, second)] == [2, 1]


def test_a_grader_may_not_pull(published: AdapterStore, api: Api) -> None:
    assert api.call("grader", "GET", f"{FILES}/latest").status_code == 403


class InProcess(Client):
    """The public client over the API in process; `damage` may spoil what comes."""

    def __init__(self, api: Api) -> None:
        super().__init__("http://in-process")
        self._api = api
        self.broken_after: int | None = None
        self.flip = False

    def adapter(self, policy: str, which: str = "latest") -> dict[str, Any]:
        document: dict[str, Any] = self._api.call(
            "ops", "GET", f"/v1/policies/{policy}/adapters/{which}"
        ).json()
        return document

    @contextmanager
    def adapter_file(self, policy: str, version: int, name: str) -> Iterator[Iterator[bytes]]:
        body: bytes = self._api.call(
            "ops", "GET", f"/v1/policies/{policy}/adapters/{version}/files/{name}"
        ).content
        if self.flip:
            body = bytes([body[0] ^ 1]) + body[1:]

        def chunks() -> Iterator[bytes]:
            for at in range(0, len(body), 7):
                if self.broken_after is not None and at > self.broken_after:
                    raise ConnectionError("cut")
                yield body[at : at + 7]

        yield chunks()


def test_pull_brings_the_files_and_swaps_the_link(published: AdapterStore, api: Api, tmp_path: Path) -> None:
    client, into = InProcess(api), tmp_path / "pulled"
    first = pull(client, "support", into, "1")
    assert (into / "current").resolve() == first.resolve()
    second = pull(client, "support", into)
    assert (into / "current").resolve() == second.resolve()
    assert sorted(path.name for path in second.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "manifest.json",
    ]  # fmt: skip


@pytest.mark.parametrize("after", [0, 40, 200])
def test_a_pull_cut_off_at_any_byte_leaves_the_old_version(
    after: int, published: AdapterStore, api: Api, tmp_path: Path
) -> None:
    client, into = InProcess(api), tmp_path / "pulled"
    first = pull(client, "support", into, "1")
    client.broken_after = after
    with pytest.raises(ConnectionError):
        pull(client, "support", into)
    assert (into / "current").resolve() == first.resolve()
    assert sorted(path.name for path in into.iterdir()) == ["current", "support-v1"]


def test_a_swapped_byte_is_found_and_refused(published: AdapterStore, api: Api, tmp_path: Path) -> None:
    client = InProcess(api)
    client.flip = True
    with pytest.raises(PullError, match="sha256"):
        pull(client, "support", tmp_path / "pulled")
    assert list((tmp_path / "pulled").iterdir()) == []


def test_a_pulled_folder_that_rotted_is_fetched_again(
    published: AdapterStore, api: Api, tmp_path: Path
) -> None:
    client, into = InProcess(api), tmp_path / "pulled"
    folder = pull(client, "support", into)
    (folder / "adapter_config.json").write_text("{}")
    again = pull(client, "support", into)
    assert json.loads((again / "adapter_config.json").read_text())["v"] == 2
