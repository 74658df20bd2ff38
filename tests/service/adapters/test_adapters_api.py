"""Adapters over HTTP and `yoro pull`: manifests, files, ETags, ranges, and a client that dies midway."""

import io
import json
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save_file
from sqlalchemy import Engine, text

from service.adapters.store import AdapterStore, describe_file
from service.api.app import create_app
from service.database.engine import transaction
from service.settings import Settings
from tests.conftest import Api, MakePolicy, Policy
from tests.service.adapters.lineage import folder_of
from yoro import Client
from yoro.pull import pull

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
            text("""INSERT INTO policy_versions (policy_id, version, parent, depth, fencing_token, folder,
                                                 manifest, manifest_sha256, adapter_sha256)
                    VALUES (:p, :v, :v - 1, :v, 1, :f, CAST(:m AS jsonb), :d, :d)"""),
            {"p": policy.id, "v": version, "f": folder, "m": json.dumps(manifest), "d": digest},
        )
        connection.execute(
            text("UPDATE lineages SET head_version = :v, promoted_version = :v WHERE policy_id = :p"),
            {"v": version, "p": policy.id},
        )


@pytest.fixture
def published(engine: Engine, settings: Settings, make_policy: MakePolicy, tmp_path: Path) -> AdapterStore:
    store = AdapterStore(settings.store_url)
    policy = make_policy()
    for version in (1, 2):
        publish_version(engine, store, policy, version, tmp_path)
    return store


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
    """The public client over the API in process."""

    def __init__(self, api: Api) -> None:
        super().__init__("http://in-process")
        self._http.close()
        self._http = api.client
        self._http.headers["Authorization"] = f"Bearer {api.keys['ops']}"


def test_pull_brings_the_files_and_swaps_the_link(published: AdapterStore, api: Api, tmp_path: Path) -> None:
    client, into = InProcess(api), tmp_path / "pulled"
    first = pull(client, "support", into, "1")
    assert (into / "current").resolve() == first.resolve()
    second = pull(client, "support", into)
    assert (into / "current").resolve() == second.resolve()
    assert sorted(path.name for path in second.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "manifest.json",
    ]  # fmt: skip


def test_a_pulled_folder_that_rotted_is_fetched_again(
    published: AdapterStore, api: Api, tmp_path: Path
) -> None:
    client, into = InProcess(api), tmp_path / "pulled"
    folder = pull(client, "support", into)
    (folder / "adapter_config.json").write_text("{}")
    again = pull(client, "support", into)
    assert json.loads((again / "adapter_config.json").read_text())["v"] == 2


def test_a_resumed_pull_gets_the_rest_from_the_real_api(
    published: AdapterStore, api: Api, tmp_path: Path
) -> None:
    whole = api.call("ops", "GET", f"{FILES}/2/files/adapter_model.safetensors").content
    partial = tmp_path / ".support-v2.partial"
    partial.mkdir()
    (partial / "adapter_model.safetensors").write_bytes(whole[:100])
    folder = pull(InProcess(api), "support", tmp_path)
    assert (folder / "adapter_model.safetensors").read_bytes() == whole


def test_the_archive_is_the_same_tar_every_time_and_can_be_resumed(
    published: AdapterStore, api: Api, tmp_path: Path
) -> None:
    first = api.call("ops", "GET", f"{FILES}/2/archive")
    assert int(first.headers["content-length"]) == len(first.content)
    assert api.call("ops", "GET", f"{FILES}/2/archive").content == first.content
    for start in (0, 1, 511, 512, 700, len(first.content) - 1):
        rest = api.call("ops", "GET", f"{FILES}/2/archive", headers={"Range": f"bytes={start}-"})
        assert (rest.status_code, rest.content) == (206, first.content[start:])
    stale = {"Range": "bytes=512-", "If-Range": '"another"'}
    assert api.call("ops", "GET", f"{FILES}/2/archive", headers=stale).content == first.content
    with tarfile.open(fileobj=io.BytesIO(first.content)) as tar:
        tar.extractall(tmp_path, filter="data")
    names = [path.name for path in sorted((tmp_path / "support-v2").iterdir())]
    assert names == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    again = api.call("ops", "GET", f"{FILES}/2/archive", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304


def test_a_range_beyond_the_end_is_refused(published: AdapterStore, api: Api) -> None:
    far = {"Range": "bytes=99999999-"}
    assert api.call("ops", "GET", f"{FILES}/2/archive", headers=far).status_code == 416


@pytest.mark.parametrize("damage", ["truncated", "swapped", "flipped"])
def test_damaged_files_are_found_when_they_are_asked_for(
    damage: str, published: AdapterStore, api: Api
) -> None:
    name = "adapter_model.safetensors"
    assert api.call("ops", "GET", f"{FILES}/2/files/{name}").status_code == 200
    path, other = (folder_of(published) / "support" / f"v{n}-1-1" / name for n in (2, 1))
    body = path.read_bytes()
    bad = {"truncated": body[:-1], "swapped": other.read_bytes(), "flipped": body[:-1] + b"!"}[damage]
    path.write_bytes(bad)
    for route in (f"files/{name}", "archive"):
        answer = api.call("ops", "GET", f"{FILES}/2/{route}")
        assert (answer.status_code, answer.json()["code"]) == (500, "torn_file")
    path.unlink()
    assert api.call("ops", "GET", f"{FILES}/2/files/{name}").json()["code"] == "version_gone"


@pytest.mark.parametrize(
    ("changes", "header", "value"),
    [
        ({"accel_redirect": "/inside/"}, "x-accel-redirect", "/inside/support/v2-1-1/adapter_config.json"),
        ({"x_sendfile": True}, "x-sendfile", "{store}/support/v2-1-1/adapter_config.json"),
    ],
)
def test_a_proxy_may_send_the_bytes(
    changes: dict[str, Any], header: str, value: str, published: AdapterStore, settings: Settings
) -> None:
    value = value.format(store=folder_of(published))
    app = create_app(settings.model_copy(update={"auth": False, **changes}))
    with TestClient(app) as client:
        answer = client.get(f"{FILES}/2/files/adapter_config.json")
    assert answer.headers[header] == value
    assert (answer.content, answer.headers["etag"][:1]) == (b"", '"')


def test_a_store_that_is_no_folder_is_streamed(
    engine: Engine, settings: Settings, make_policy: MakePolicy, tmp_path: Path
) -> None:
    remote = settings.model_copy(update={"auth": False, "adapters_url": f"memory://{tmp_path.name}"})
    publish_version(engine, AdapterStore(remote.adapters_url), make_policy(), 1, tmp_path)
    with TestClient(create_app(Settings(**remote.model_dump()))) as client:
        whole = client.get(f"{FILES}/1/files/adapter_config.json")
        part = client.get(f"{FILES}/1/files/adapter_config.json", headers={"Range": "bytes=-3"})
        assert client.get(f"{FILES}/1/archive").status_code == 200
    assert json.loads(whole.content)["v"] == 1
    assert (part.status_code, part.content) == (206, whole.content[-3:])
