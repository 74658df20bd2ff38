"""What the client is told: kafka-python's traps, sizes, SASL and TLS. Not run over the wire here."""

from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from service.errors import Invalid
from service.ingest.kafka_arguments import connection_arguments, consumer_arguments, producer_arguments
from service.ingest.messages import all_topics, topics_of
from service.settings import KafkaSettings, Limits

SCRAM = {
    "YORO_KAFKA_BOOTSTRAP": "a:9093, b:9093", "YORO_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
    "YORO_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512", "YORO_KAFKA_SASL_USERNAME": "yoro",
    "YORO_KAFKA_SASL_PASSWORD": "hunter2", "YORO_KAFKA_SSL_CAFILE": "/etc/ca.pem",
}  # fmt: skip
MTLS = {
    "YORO_KAFKA_SECURITY_PROTOCOL": "SSL", "YORO_KAFKA_SSL_CERTFILE": "/etc/me.pem",
    "YORO_KAFKA_SSL_KEYFILE": "/etc/me.key", "YORO_KAFKA_SSL_PASSWORD": "hunter3",
    "YORO_KAFKA_SSL_CHECK_HOSTNAME": "false",
}  # fmt: skip


@pytest.fixture
def scram(monkeypatch: pytest.MonkeyPatch) -> KafkaSettings:
    for name, value in SCRAM.items():
        monkeypatch.setenv(name, value)
    return KafkaSettings()


def test_a_new_group_begins_at_the_beginning_and_nothing_is_committed_by_itself() -> None:
    told = consumer_arguments(KafkaSettings(), Limits())
    assert (told["auto_offset_reset"], told["enable_auto_commit"]) == ("earliest", False)
    assert told["heartbeat_interval_ms"] * 3 <= told["session_timeout_ms"]
    assert not told["allow_auto_create_topics"]


def test_a_message_of_the_largest_size_fits_through_every_part() -> None:
    limits = Limits(body_bytes=40 << 20)
    consumer, producer = (
        consumer_arguments(KafkaSettings(), limits),
        producer_arguments(KafkaSettings(), limits),
    )
    for told in (
        consumer["max_partition_fetch_bytes"],
        consumer["fetch_max_bytes"],
        producer["max_request_size"],
    ):
        assert told > limits.body_bytes
    assert producer["acks"] == "all"


def test_scram_and_tls_reach_the_client(scram: KafkaSettings) -> None:
    told = connection_arguments(scram)
    assert told["bootstrap_servers"] == ["a:9093", "b:9093"]
    assert told["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (told["sasl_plain_username"], told["sasl_plain_password"]) == ("yoro", "hunter2")
    assert (told["security_protocol"], told["ssl_cafile"], told["ssl_check_hostname"]) == (
        "SASL_SSL", "/etc/ca.pem", True,
    )  # fmt: skip
    assert "hunter2" not in repr(scram)


def test_mtls_reaches_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MTLS.items():
        monkeypatch.setenv(name, value)
    told = connection_arguments(KafkaSettings())
    assert (told["ssl_certfile"], told["ssl_keyfile"], told["ssl_password"]) == (
        "/etc/me.pem", "/etc/me.key", "hunter3",
    )  # fmt: skip
    assert told["ssl_check_hostname"] is False
    assert "sasl_mechanism" not in told


def test_every_argument_is_one_that_the_client_knows(scram: KafkaSettings) -> None:
    assert consumer_arguments(scram, Limits()).keys() <= KafkaConsumer.DEFAULT_CONFIG.keys()
    assert producer_arguments(scram, Limits()).keys() <= KafkaProducer.DEFAULT_CONFIG.keys()
    assert connection_arguments(scram).keys() <= KafkaAdminClient.DEFAULT_CONFIG.keys()


def test_topics_are_named_by_prefix_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    settings = KafkaSettings(prefixes={"acme.": ("acme",)}, graded_topics=("acme.yoro.traces",))
    assert all_topics(settings) == [
        "acme.yoro.dead-letter", "acme.yoro.rewards", "acme.yoro.traces",
        "yoro.dead-letter", "yoro.rewards", "yoro.traces",
    ]  # fmt: skip
    found = topics_of(settings)
    assert [name for name, topic in found.items() if topic.takes_grades] == ["acme.yoro.traces"]
    with pytest.raises(Invalid, match=r"yoro\.traces"):
        topics_of(KafkaSettings(rewards_topic="yoro.traces"))
