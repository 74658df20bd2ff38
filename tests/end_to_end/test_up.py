"""`yoro up` end to end: from posted traces to a pulled adapter; stops, kills and restarts."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from service.ingest.kafka import Publisher
from service.ingest.messages import Message, Partition
from service.settings import KafkaSettings, Limits
from tests.documents import grade, trace
from tests.end_to_end import installation
from tests.end_to_end.installation import Installation, all_gone, await_that
from tests.faults.worker_process import tiny_model_root
from yoro.ports import free_port

SETTINGS: dict[str, Any] = {
    "adapter": {"rank": 4},
    "optimizer": {"learning_rate": 1e-3},
    "objective": {"gate": "none"},
    "sequences": {"precision": "fp32", "max_tokens": 256},
    "batching": {"size": 4},
}


@pytest.fixture(scope="module")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_root(tmp_path_factory.mktemp("models"))


@pytest.fixture
def up(tmp_path: Path, model_root: Path) -> Iterator[Installation]:
    running = installation.start(tmp_path / "data", model_root)
    yield running
    if running.process.poll() is None:
        running.stop(signal.SIGKILL)


def post_batch(up: Installation, policy: str, count: int = 4) -> None:
    with up.client() as client:
        for number in range(count):
            document = trace(policy=policy)
            client.post_trace(document)
            client.post_reward(grade(document["trace_id"], number / 3, policy=policy))


def head(up: Installation, policy: str) -> int:
    with up.client() as client:
        return int(client.status(policy)["head_version"])


@pytest.mark.timeout(240)
def test_from_posted_traces_to_an_adapter_that_plain_peft_loads(up: Installation, tmp_path: Path) -> None:
    key = up.data / "admin.key"
    assert key.stat().st_mode & 0o777 == 0o600
    up.yoro("policy", "create", "support", "--base-model", "./tiny")
    with up.client() as client:
        client.revise_policy("support", {k: v for k, v in SETTINGS.items() if k != "adapter"})
    assert '"size": 4' in up.yoro("policy", "show", "support")
    post_batch(up, "support")
    await_that(lambda: head(up, "support") == 1, 120)
    assert "version 1" in up.yoro("status", "support")

    pulled = up.yoro("pull", "support", "--into", str(tmp_path / "pulled")).strip()
    assert (tmp_path / "pulled" / "current").resolve() == Path(pulled).resolve()
    base = AutoModelForCausalLM.from_pretrained(up.model_root / "tiny")
    adapted = PeftModel.from_pretrained(base, pulled)
    trained = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert any(parameter.abs().sum() > 0 for parameter in trained)

    assert up.on_server("adapters", "gc", "--keep", "1", "--younger-hours", "0") == ""
    with pytest.raises(AssertionError, match="Another `yoro up` runs in"):
        up.on_server("adapters", "recover")
    family = up.family()
    assert up.stop(signal.SIGINT) == 0
    assert all_gone(family)
    assert "support: the next version is 2" in up.on_server("adapters", "recover")

    again = installation.start(up.data, up.model_root)
    try:
        assert head(again, "support") == 1
        post_batch(again, "support")
        await_that(lambda: head(again, "support") == 2, 120)
    finally:
        assert again.stop() == 0


@pytest.mark.timeout(240)
def test_after_sigkill_of_up_nothing_is_orphaned_and_the_next_up_recovers(up: Installation) -> None:
    with up.client() as client:
        client.create_policy("support", base_model="./tiny", **SETTINGS)
        document = trace(policy="support")
        client.post_trace(document)
    family = up.family()
    assert len(family) > 4
    up.stop(signal.SIGKILL)
    await_that(lambda: all_gone(family), 60)

    again = installation.start(up.data, up.model_root, "--without", "trainer", "--without", "scheduler")
    try:
        with again.client() as client:
            assert client.post_trace(document)["status"] == "duplicate"
    finally:
        assert again.stop() == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", ["postgres", "api", "train"])
def test_a_child_that_is_killed_is_started_again(victim: str, up: Installation) -> None:
    with up.client() as client:
        client.create_policy("support", base_model="./tiny", **SETTINGS)
    killed = up.child(victim)
    killed.kill()
    await_that(lambda: not killed.is_running() or killed.status() == "zombie")
    post_batch(up, "support")
    await_that(lambda: head(up, "support") == 1, 120)
    assert up.stop() == 0


@pytest.mark.timeout(240)
def test_up_with_kafka_takes_what_is_published_and_starts_a_dead_broker_again(
    tmp_path: Path, model_root: Path
) -> None:
    port = str(free_port())
    parts = ("--without", "trainer", "--without", "scheduler")
    up = installation.start(tmp_path / "data", model_root, "--kafka", "--kafka-port", port, *parts)
    try:
        kafka = KafkaSettings(bootstrap=f"127.0.0.1:{port}")
        publisher = Publisher(kafka, Limits())

        def publish(topic: str, document: dict[str, Any]) -> None:
            body, key = json.dumps(document).encode(), document["trace_id"].encode()
            message = Message(Partition(topic, -1), 0, key, body)
            await_that(lambda: publisher.send([message]) == [""])

        with up.client() as client:
            first = trace(policy="support")
            publish("yoro.traces", first)
            await_that(lambda: [letter["code"] for letter in client.dead_letters()] == ["policy_not_found"])
            client.create_policy("support", base_model="./tiny", **SETTINGS)
            assert "accepted" in up.yoro("dead-letter", "replay", "--code", "policy_not_found")
            assert list(client.dead_letters()) == []
            publish("yoro.rewards", grade(first["trace_id"], policy="support"))
            await_that(lambda: client.status("support")["rollouts"]["ready"] == 1)

            broker = up.child("noida-db")
            broker.terminate()
            await_that(lambda: not broker.is_running() or broker.status() == "zombie")
            publish("yoro.traces", trace(policy="support"))
            await_that(lambda: client.status("support")["rollouts"]["waiting_reward"] == 1)
        publisher.close()
        family = up.family()
        assert up.stop() == 0
        assert all_gone(family)
    finally:
        if up.process.poll() is None:
            up.stop(signal.SIGKILL)


def test_a_second_up_in_the_same_folder_is_refused_in_words(up: Installation) -> None:
    with pytest.raises(AssertionError, match="Another `yoro up` runs in"):
        installation.start(up.data, up.model_root)
    assert up.stop() == 0
