"""serve-sync against servers that misbehave in each way that others met (adapters.md §8)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.adapters.replicas import Sglang, Vllm
from service.adapters.serving import Synchroniser, Wanted, judge, wanted
from tests.service.adapters.fake_servers import BASE_LOGPROBS, FakeServer


class Clock:
    """A time that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    made = FakeServer(request.param)
    yield made
    made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sync(server: FakeServer, clock: Clock) -> Synchroniser:
    return synchroniser(server, clock)


def synchroniser(server: FakeServer, clock: Clock) -> Synchroniser:
    replica = Vllm(server.url) if server.kind == "vllm" else Sglang(server.url)
    return Synchroniser(replica, "support", slots=2, drain_seconds=300, clock=clock)


def version(tmp_path: Path, number: int, logprobs: list[float] | None = None) -> Wanted:
    folder = tmp_path / f"support-v{number}"
    manifest: dict[str, Any] = {
        "version": number,
        "probe": {"text": "probe", "logprobs": logprobs or [-1.0 - number / 4, -2.0, -3.0]},
    }
    if not folder.exists():
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return wanted("support", manifest, str(folder))


def test_a_version_is_loaded_under_its_own_name_and_probed(
    server: FakeServer, sync: Synchroniser, tmp_path: Path
) -> None:
    state = sync.reconcile(version(tmp_path, 1))
    assert (state.ready, state.loaded, state.problem) == (True, ("support-v1",), "")
    sync.reconcile(version(tmp_path, 1))
    assert server.engine.loads == ["support-v1"]
    assert server.engine.in_place == 0


def test_an_old_version_stays_until_it_has_drained(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    sync.reconcile(version(tmp_path, 1))
    assert sync.reconcile(version(tmp_path, 2)).loaded == ("support-v1", "support-v2")
    clock.now = 299
    assert sync.reconcile(version(tmp_path, 2)).loaded == ("support-v1", "support-v2")
    clock.now = 301
    assert sync.reconcile(version(tmp_path, 2)).loaded == ("support-v2",)


def test_a_version_in_use_stays_while_its_successor_is_not_ready(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    sync.reconcile(version(tmp_path, 1))
    server.engine.serves_base = True
    for clock.now in (10, 400, 800):
        state = sync.reconcile(version(tmp_path, 2), "support-v1")
        assert (state.ready, state.loaded) == (False, ("support-v1",))
    server.engine.serves_base = False
    assert sync.reconcile(version(tmp_path, 3), "support-v1").ready
    clock.now = 1200  # callers were told of version 3 now only
    sync.reconcile(version(tmp_path, 3), "support-v3")
    clock.now = 1499
    assert sync.reconcile(version(tmp_path, 3), "support-v3").loaded == ("support-v1", "support-v3")
    clock.now = 1501
    assert sync.reconcile(version(tmp_path, 3), "support-v3").loaded == ("support-v3",)


def test_a_load_never_evicts_what_may_still_answer_requests(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    sync.reconcile(version(tmp_path, 1)), sync.reconcile(version(tmp_path, 2))
    state = sync.reconcile(version(tmp_path, 3))
    assert (state.ready, state.loaded) == (False, ("support-v1", "support-v2"))
    assert "no free slot" in state.problem
    clock.now = 301
    assert sync.reconcile(version(tmp_path, 3)).ready
    assert server.engine.evicted == []


def test_a_rollback_finds_the_older_version_still_loaded(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    sync.reconcile(version(tmp_path, 1)), sync.reconcile(version(tmp_path, 2))
    clock.now = 200
    assert sync.reconcile(version(tmp_path, 1)).ready
    clock.now = 400  # 1 was unwanted for a while; that counts no more
    assert sync.reconcile(version(tmp_path, 1)).loaded == ("support-v1", "support-v2")
    assert server.engine.loads == ["support-v1", "support-v2"]


def test_a_server_that_restarted_is_loaded_and_probed_again(
    server: FakeServer, sync: Synchroniser, tmp_path: Path
) -> None:
    sync.reconcile(version(tmp_path, 1))
    server.engine.restart()
    server.engine.serves_base = True
    assert not sync.reconcile(version(tmp_path, 1)).ready
    server.engine.restart()
    server.engine.serves_base = False
    fresh = synchroniser(server, Clock())
    assert fresh.reconcile(version(tmp_path, 1)).ready


def test_a_server_that_is_away_is_not_ready_and_comes_back(
    server: FakeServer, sync: Synchroniser, tmp_path: Path
) -> None:
    server.engine.is_down = True
    assert not sync.reconcile(version(tmp_path, 1)).ready
    server.engine.is_down = False
    assert sync.reconcile(version(tmp_path, 1)).ready


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"serves_base": True}, "off by|base model"),
        ({"loses_loads": True}, "does not list it"),
        ({"answers_nan": True}, "off by"),
        ({"noise": 0.5}, "off by"),
        ({"other_tokenizer": True}, "another tokenizer"),
        ({"fails_loads": 1}, "the engine failed"),
    ],
)
def test_a_200_proves_nothing(
    fault: dict[str, Any], problem: str, server: FakeServer, sync: Synchroniser, tmp_path: Path
) -> None:
    for name, value in fault.items():
        setattr(server.engine, name, value)
    state = sync.reconcile(version(tmp_path, 1))
    assert not state.ready
    assert any(each in state.problem for each in problem.split("|")), state.problem
    assert state.loaded == ()  # nothing that failed stays where somebody might ask it


def test_an_adapter_that_changes_nothing_is_found_though_it_is_near_the_base(
    server: FakeServer, sync: Synchroniser, tmp_path: Path
) -> None:
    server.engine.serves_base = True
    near = [value - 0.05 for value in BASE_LOGPROBS]  # within the tolerance of 16-bit floats
    assert "adapter changes nothing" in sync.reconcile(version(tmp_path, 1, near)).problem


def test_a_first_step_too_small_for_16_bits_is_not_refused(
    server: FakeServer, sync: Synchroniser, tmp_path: Path
) -> None:
    server.engine.serves_base = True
    same = [value - 1e-4 for value in BASE_LOGPROBS]
    assert sync.reconcile(version(tmp_path, 1, same)).ready


def test_a_version_mixed_up_with_another_is_found(
    server: FakeServer, sync: Synchroniser, tmp_path: Path
) -> None:
    sync.reconcile(version(tmp_path, 1))
    server.engine.mixes_up = True
    assert "off by" in sync.reconcile(version(tmp_path, 4)).problem


def test_a_version_that_failed_its_probe_is_not_loaded_again_at_once(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    server.engine.serves_base = True
    for _ in range(3):
        sync.reconcile(version(tmp_path, 1))
    assert server.engine.loads == ["support-v1"]
    server.engine.serves_base = False
    clock.now = 61
    assert sync.reconcile(version(tmp_path, 1)).ready


def test_other_bytes_under_our_name_are_refused_and_left_alone(
    server: FakeServer, sync: Synchroniser, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    server.engine.adapters["support-v1"] = (str(other), BASE_LOGPROBS)
    state = sync.reconcile(version(tmp_path, 1))
    assert not state.ready
    assert "a name is used once" in state.problem
    assert server.engine.loads == []


def test_no_name_is_ever_loaded_with_other_bytes(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    paths: dict[str, str] = {}
    for number in (1, 2, 1, 3, 2, 1):
        clock.now += 301
        sync.reconcile(version(tmp_path, number))
        for name, (path, _) in server.engine.adapters.items():
            assert paths.setdefault(name, path) == path


def test_unload_that_is_ignored_is_seen_in_the_server_s_own_list(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    sync.reconcile(version(tmp_path, 1)), sync.reconcile(version(tmp_path, 2))
    server.engine.unload_is_ignored = True
    clock.now = 301
    state = sync.reconcile(version(tmp_path, 3))
    assert (state.ready, state.loaded) == (False, ("support-v1", "support-v2"))


def test_fifty_versions_in_turn_leave_two_loaded(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    for number in range(1, 51):
        clock.now += 301
        assert sync.reconcile(version(tmp_path, number)).ready
    assert len(server.engine.adapters) <= 2
    assert server.engine.evicted == []


def test_a_server_whose_slots_are_burnt_says_so_until_it_is_restarted(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    server.engine.unload_burns_slots = True
    for number in range(1, 5):
        clock.now += 301
        state = sync.reconcile(version(tmp_path, number))
    assert "restart it" in state.warning
    server.engine.restart()
    state = sync.reconcile(version(tmp_path, 5))
    assert (state.ready, state.warning) == (True, "")


def test_adapters_of_others_are_left_alone_and_take_their_slot(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    server.engine.adapters["sales-v9"] = ("/elsewhere", BASE_LOGPROBS)
    server.engine.adapters["support-vnext"] = ("/elsewhere", BASE_LOGPROBS)
    clock.now = 1000
    state = sync.reconcile(version(tmp_path, 1))
    assert "no free slot" in state.problem
    assert set(server.engine.adapters) == {"sales-v9", "support-vnext"}


def test_back_to_the_base_model_every_version_drains(
    server: FakeServer, sync: Synchroniser, clock: Clock, tmp_path: Path
) -> None:
    sync.reconcile(version(tmp_path, 1))
    assert sync.reconcile(None).ready
    clock.now = 301
    assert sync.reconcile(None).loaded == ()


def test_one_replica_that_fails_keeps_the_other_from_nothing(clock: Clock, tmp_path: Path) -> None:
    servers = [FakeServer("vllm"), FakeServer("sglang")]
    servers[0].engine.fails_loads = 1
    states = [synchroniser(each, clock).reconcile(version(tmp_path, 1)) for each in servers]
    assert [state.ready for state in states] == [False, True]
    for each in servers:
        each.close()


def test_judgement_of_equal_lengths_and_numbers() -> None:
    assert judge([-1.0], [-2.0], [-1.05]) == ""
    assert judge([], [], [-1.0]) != ""
