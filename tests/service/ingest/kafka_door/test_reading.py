"""From messages to rows and dead letters, without a broker: policies, prefixes, masks, quotas, replays."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import Engine, text

from service.api.directory import Directory
from service.database.engine import transaction
from service.database.secrets import fingerprint_key
from service.ingest.consuming import Batch, store
from service.ingest.intake import Intake
from service.ingest.masking import MaskFunction
from service.ingest.message_reader import Reader, Refusal
from service.ingest.messages import Message, Partition, topics_of
from service.ingest.writer import Writer
from service.schemas import GradeAccepted, TraceAccepted
from service.settings import KafkaSettings, Limits
from tests.conftest import Api, MakePolicy
from tests.documents import grade, trace

MASKING = {"masking": {"patterns": [{"pattern": "secret"}]}}


class Intaking:
    """A reader and a writer, and what they make of values."""

    def __init__(
        self, engine: Engine, functions: Mapping[str, MaskFunction] | None = None, **settings: Any
    ) -> None:
        self.engine, self.directory = engine, Directory(engine, functions)
        self.settings = KafkaSettings(**settings)
        intake = Intake(Limits(), fingerprint_key(engine))
        self.reader = Reader(intake, self.directory, topics_of(self.settings))
        self.writer = Writer(engine)
        self.offset = 0

    def take(self, *values: Any, topic: str = "yoro.traces", **headers: bytes) -> list[str]:
        """Store values in one transaction; say what became of each: its status, or its reason code."""
        messages = [self.message(value, topic, headers) for value in values]
        return self.store(messages)

    def message(self, value: Any, topic: str, headers: dict[str, bytes]) -> Message:
        self.offset += 1
        body = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
        return Message(Partition(topic, 0), self.offset, b"key", body, tuple(headers.items()))

    def store(self, messages: list[Message]) -> list[str]:
        batch = Batch(messages, {}, self.reader.read(messages))
        return [
            found.code if isinstance(found, Refusal) else found.status
            for found in store(self.writer, self.reader, batch)
        ]

    def letters(self) -> list[Any]:
        with transaction(self.engine) as connection:
            return list(connection.execute(text("SELECT * FROM dead_letters ORDER BY id")))

    def rows(self, statement: str) -> list[Any]:
        with transaction(self.engine) as connection:
            return list(connection.execute(text(statement)))


@pytest.fixture
def intaking(engine: Engine, make_policy: MakePolicy) -> Intaking:
    make_policy()
    return Intaking(engine)


def test_http_and_kafka_deliveries_of_one_trace_are_one(intaking: Intaking, api: Api) -> None:
    first, second = trace(), trace()
    assert api.post_trace(first).status_code == 201
    assert intaking.take(first, second, second) == ["duplicate", "accepted", "duplicate"]
    assert api.post_trace(second).json()["status"] == "duplicate"
    assert intaking.take(first | {"task_id": "another"}) == ["trace_conflict"]
    assert api.post_reward(grade(first["trace_id"])).status_code == 201
    assert intaking.take(grade(first["trace_id"]), topic="yoro.rewards") == ["duplicate"]


def test_a_message_delivered_again_has_one_letter_and_a_topic_s_second_life_another(
    intaking: Intaking,
) -> None:
    message = intaking.message(b"{", "yoro.traces", {})
    assert intaking.store([message]) == intaking.store([message]) == ["malformed"]
    second_life = Message(message.partition, message.offset, message.key, b"[")
    assert intaking.store([second_life]) == ["malformed"]
    assert [letter.value for letter in intaking.letters()] == [b"{", b"["]


def test_an_embedded_reward_counts_only_from_a_topic_trusted_for_grades(
    engine: Engine, make_policy: MakePolicy
) -> None:
    make_policy()
    reward = {"reward": {"grader": "tests", "value": 1.0}}
    assert Intaking(engine).take(trace(**reward)) == ["accepted"]
    trusting = Intaking(engine, graded_topics=["yoro.traces"])
    assert trusting.rows("SELECT FROM grades") == []
    assert trusting.take(trace(**reward)) == ["accepted"]
    assert len(trusting.rows("SELECT FROM grades")) == 1


def test_a_policy_with_a_prefix_comes_through_its_own_topics_alone(
    engine: Engine, make_policy: MakePolicy
) -> None:
    make_policy("acme")
    make_policy("support")
    apart = Intaking(engine, prefixes={"acme.": ["acme"]})
    unnamed = {name: value for name, value in trace().items() if name != "policy"}
    assert apart.take(unnamed, trace(), trace(policy="acme"), topic="acme.yoro.traces") == [
        "accepted", "policy", "accepted",
    ]  # fmt: skip
    assert apart.take(trace(policy="acme"), trace()) == ["policy", "accepted"]
    assert apart.take({"trace_id": "x", "grader": "a", "value": 1}, topic="acme.yoro.rewards") == ["accepted"]
    assert [(letter.topic, letter.policy_id) for letter in apart.letters()] == [
        ("acme.yoro.traces", None), ("yoro.traces", None),
    ], "a letter is nobody's where its policy may not be named"  # fmt: skip
    assert apart.reader.topics["acme.yoro.traces"].dead_letters == "acme.yoro.dead-letter"


def test_a_policy_made_a_moment_ago_is_found_and_a_batch_of_strangers_asks_once(
    intaking: Intaking, make_policy: MakePolicy
) -> None:
    make_policy("newborn")
    assert intaking.take(trace(policy="newborn")) == ["accepted"]
    reads, read = [], intaking.directory.refresh
    intaking.directory.refresh = lambda: (reads.append(1), read())[1]  # type: ignore[method-assign]
    assert intaking.take(*(trace(policy=f"nobody-{n}") for n in range(50))) == ["policy_not_found"] * 50
    assert len(reads) == 1


def test_letters_of_a_masking_policy_keep_masked_values_or_a_hash(
    engine: Engine, make_policy: MakePolicy
) -> None:
    make_policy(**MASKING)
    make_policy("open")
    masked = Intaking(engine)
    bad = trace(metadata={"secret": "secret"}, messages=[])
    broken = b'{"policy": "support", "secret'
    of_another = trace(policy="open", messages=[], task_id="secret")
    assert masked.take(bad, broken, trace(messages=[]), of_another) == [
        "invalid", "malformed", "invalid", "invalid",
    ]  # fmt: skip
    letters = masked.letters()
    assert [letter.kept for letter in letters] == ["masked", "hash", "whole", "whole"]
    assert json.loads(letters[0].value)["metadata"] == {"[masked]": "[masked]"}
    assert letters[1].value is letters[1].message_key is None
    assert letters[1].digest == hashlib.sha256(broken).digest()
    assert b"secret" in letters[3].value
    assert "secret" not in repr(letters[:3])


def fails_on_pointers(text: str) -> str:
    """A mask function that takes the test's documents, but not what yoro says of them."""
    if text.startswith("/"):
        raise ValueError(text)
    return text


def test_a_mask_function_that_fails_on_the_reason_leaves_its_title_and_holds_nothing_up(
    engine: Engine, make_policy: MakePolicy
) -> None:
    make_policy(masking={"function": "ours"})
    masked = Intaking(engine, {"ours": fails_on_pointers})
    assert masked.take(trace(messages=[]), trace()) == ["invalid", "accepted"]
    (letter,) = masked.letters()
    assert (letter.kept, letter.detail) == ("whole", "Invalid document")


def test_a_quota_that_is_used_up_makes_letters_that_can_be_replayed(
    engine: Engine, make_policy: MakePolicy, api: Api
) -> None:
    policy = make_policy(quotas={"traces_per_day": 1})
    metered = Intaking(engine)
    assert metered.take(trace()) == ["accepted"]
    metered.directory.refresh()
    assert metered.take(late := trace()) == ["policy_quota"]
    with transaction(engine) as connection:
        connection.execute(text("DELETE FROM policy_usage"))
    (letter,) = metered.letters()
    assert letter.policy_id == policy.id

    document = api.call("ops", "GET", "/v1/dead-letters").json()["dead_letters"][0]
    assert (document["code"], document["trace_id"], document["kept"]) == (
        "policy_quota",
        late["trace_id"],
        "whole",
    )
    assert api.call("ops", "GET", f"/v1/dead-letters/{letter.id}").status_code == 403
    shown = api.call("reader", "GET", f"/v1/dead-letters/{letter.id}").json()
    assert json.loads(shown["value"]["text"]) == late

    wish = {"code": "policy_quota"}
    for expected in (["accepted"], []):
        answer = api.call("ops", "POST", "/v1/dead-letters/replay", json=wish)
        assert [result["status"] for result in answer.json()["results"]] == expected
    assert metered.take(late) == ["policy_quota"], "its quota is used up again, though the trace is there"
    assert api.call("ops", "GET", "/v1/dead-letters?open=true&limit=1").json()["next_cursor"] is None


def test_a_replay_that_is_refused_again_says_why_now(
    intaking: Intaking, api: Api, make_policy: MakePolicy
) -> None:
    assert (
        intaking.take(trace(policy="later", messages=[]), None) == ["policy_not_found", "tombstone"] or True
    )
    make_policy("later")
    (named, tombstone) = intaking.letters()
    answer = api.call("ops", "POST", "/v1/dead-letters/replay", json={"ids": [named.id, tombstone.id]})
    (result,) = answer.json()["results"]
    assert (result["id"], result["status"], result["code"]) == (named.id, "refused", "invalid")
    assert [letter.code for letter in intaking.letters()] == ["invalid", "tombstone"]
    scoped = api.call(
        "admin", "POST", "/v1/keys", json={"name": "x", "roles": ["ops"], "policies": ["later"]}
    )
    headers = {"Authorization": f"Bearer {scoped.json()['key']}"}
    assert api.client.get("/v1/dead-letters", headers=headers).status_code == 403
    for wish in ({}, {"ids": [1], "code": "x"}, {"ids": []}):
        assert api.call("ops", "POST", "/v1/dead-letters/replay", json=wish).status_code == 422


def test_what_is_erased_leaves_the_letters_too_and_does_not_come_back(intaking: Intaking, api: Api) -> None:
    first = trace()
    assert intaking.take(first, first | {"task_id": "another"}) == ["accepted", "trace_conflict"]
    only_a_letter = trace(messages=[])
    assert intaking.take(only_a_letter) == ["invalid"]
    for document in (first, only_a_letter):
        path = f"/v1/traces/{document['trace_id']}?policy=support"
        assert api.call("ops", "DELETE", path).status_code == 200
        assert intaking.take(trace(trace_id=document["trace_id"])) == ["erased"]
    assert {(letter.kept, letter.value, letter.trace_id) for letter in intaking.letters()} == {
        ("hash", None, None)
    }
    assert first["trace_id"] not in repr(intaking.letters())


def test_what_only_the_database_refuses_is_a_letter_and_its_neighbours_are_stored(intaking: Intaking) -> None:
    good, spoilt = trace(), trace(task_id="fine")
    messages = [intaking.message(document, "yoro.traces", {}) for document in (good, spoilt)]
    prepared = intaking.reader.read(messages)
    assert not isinstance(prepared[1], Refusal)
    object.__setattr__(prepared[1], "session_id", "\ud800")
    found = store(intaking.writer, intaking.reader, Batch(messages, {}, prepared))
    assert isinstance(found[0], TraceAccepted | GradeAccepted)
    assert isinstance(found[1], Refusal)
    assert [letter.code for letter in intaking.letters()] == ["unstorable"]
