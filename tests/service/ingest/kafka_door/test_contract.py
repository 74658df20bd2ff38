"""The contract over the wire, against every broker that can be had (brokers.py)."""

import hashlib
import itertools
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from sqlalchemy import text

from service.database.engine import transaction
from service.ingest.dead_letter_relay import LetterRelay
from service.ingest.kafka import Publisher
from service.ingest.messages import topics_of
from tests.conftest import MakePolicy
from tests.documents import grade, trace
from tests.service.ingest.kafka_door.conftest import LIMITS, PARTITIONS, Door, await_that, message


def received(door: Door, topic: str, count: int) -> list[Any]:
    """Read a topic from its beginning, outside of any group."""
    found: list[Any] = []
    with KafkaConsumer(bootstrap_servers=door.settings.bootstrap, auto_offset_reset="earliest") as reader:
        reader.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
        await_that(
            lambda: bool(found.extend(itertools.chain(*reader.poll(200).values())) or len(found) >= count)
        )
    return found


def test_one_poll_takes_what_is_good_and_keeps_what_is_not(door: Door, make_policy: MakePolicy) -> None:
    """Traces, grades, codecs, sizes, odd headers, tombstones, poison: each is accounted for."""
    make_policy()
    first, conflicting = trace(), trace()
    big = trace(messages=[{"role": "user", "content": "x" * (LIMITS.trace_bytes - 1_000)}])
    too_big = trace(messages=[{"role": "user", "content": "x" * (LIMITS.trace_bytes + 1_000)}])
    taken = [first, first, conflicting, trace(reward={"grader": "tests", "value": 1.0}), big]
    for codec in (None, "gzip", "lz4", "zstd", "snappy"):
        documents = [trace(), trace()]
        taken += documents
        messages = [message(door.traces, document) for document in documents]
        assert door.publisher(compression_type=codec, linger_ms=50).send(messages) == ["", ""]
    door.send(door.traces, *taken[:5])
    headers = {"traceparent": b"00-1-2-01", "yoro-schema": b"1", "odd": b"\xff"}
    door.send(door.traces, with_headers := trace(), **headers)
    door.send(door.rewards, grade(first["trace_id"]), grade("of a trace to come".replace(" ", "-")))
    poison = {
        "tombstone": None, "malformed": b"{no json", "invalid": trace(messages=[]),
        "policy_not_found": trace(policy="nobody"), "trace_bytes": too_big, "number": b'{"x": NaN}',
        "trace_conflict": conflicting | {"task_id": "other"},
    }  # fmt: skip
    door.send(door.traces, *poison.values())
    door.send(door.traces, trace(), **{"yoro-schema": b"2"})
    door.send(door.rewards, grade("x", 7.0))
    traces = {document["trace_id"] for document in [*taken, with_headers]}

    with door.consuming() as consumer:
        await_that(lambda: len(door.letters()) == 9 and door.count("rollout_documents") == len(traces))
        await_that(lambda: all(not lag.messages for lag in consumer.meter.lags().values()))
        assert consumer.meter.is_ready()
    letters = {letter.code: letter for letter in door.letters()}
    assert set(letters) == {*poison, "schema_version", "value"}
    assert letters["malformed"].value == b"{no json"
    assert letters["tombstone"].value is None
    assert letters["tombstone"].size is None
    assert hashlib.sha256(letters["trace_bytes"].value).digest() == letters["trace_bytes"].digest
    assert "/messages" in letters["invalid"].detail
    assert {letter.kept for letter in letters.values()} == {"whole"}
    with transaction(door.engine) as connection:
        grades = connection.execute(text("SELECT count(*) FROM grades")).scalar_one()
    assert grades == 2, "the embedded reward is left out: the topic is not trusted for grades"

    relay = LetterRelay(
        door.engine, lambda: Publisher(door.settings, LIMITS), topics_of(door.settings),
        default=door.settings.dead_letter_topic, keep_days=30,
    )  # fmt: skip
    while relay.tick():
        pass
    found = {
        dict(each.headers)["yoro-reason"].decode(): each
        for each in received(door, door.settings.dead_letter_topic, 9)
    }
    for code, letter in letters.items():
        sent = dict(found[code].headers)
        assert found[code].value == letter.value
        assert (sent["yoro-topic"], sent["yoro-partition"], sent["yoro-offset"]) == (
            letter.topic.encode(), b"%d" % letter.partition, b"%d" % letter.message_offset,
        )  # fmt: skip
    assert all(letter.due_at is None for letter in door.letters())


def test_what_was_committed_is_not_read_again_and_what_was_not_is(
    door: Door, make_policy: MakePolicy
) -> None:
    make_policy()
    door.send(door.traces, *(trace() for _ in range(20)))
    with door.consuming():
        await_that(lambda: door.count("rollouts") == 20)
    door.send(door.traces, *(trace() for _ in range(5)))
    with door.consuming() as consumer:
        seen: list[int] = []
        stored = consumer.meter.stored
        consumer.meter.stored = lambda messages: (seen.append(len(messages)), stored(messages))[1]  # type: ignore[method-assign]
        await_that(lambda: door.count("rollouts") == 25 and sum(seen) >= 5)
    assert sum(seen) == 5
