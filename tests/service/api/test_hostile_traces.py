"""Hostile documents at the trace door: a clear answer, never a 500, never a silently altered trace."""

import json
from typing import Any

import pytest
from sqlalchemy import Engine

from service.database.documents import read_document
from tests.conftest import Api
from tests.documents import trace
from tests.service.api.conftest import send, stored


def text_of(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def with_metadata(value: str) -> bytes:
    """A trace whose metadata is JSON text put in as it is."""
    return text_of(trace(metadata={"x": "HERE"})).replace(b'"HERE"', value.encode())


@pytest.mark.parametrize(
    ("value", "status", "code"),
    [
        ("NaN", 422, "number"),
        ("Infinity", 422, "number"),
        ("-Infinity", 422, "number"),
        ("1e999", 422, "number"),
        ("1" * 400 + ".5", 422, "number"),
        ("12345678901234567890123", 422, "number"),
        ("1" * 100_000, 422, "number"),
        ('"\\ud83d"', 400, "malformed"),
        ('{"\\udc00": 1}', 400, "malformed"),
        ('{"a": 1, "a": 2}', 400, "malformed"),
        ("[1,]", 400, "malformed"),
        ("01", 400, "malformed"),
        ('"\x01"', 400, "malformed"),
        ("[" * 70 + "]" * 70, 422, "json_depth"),
        ("[" * 100_000 + "]" * 100_000, 422, "json_depth"),
    ],
)
def test_what_json_cannot_keep_is_refused_by_name(door: Api, value: str, status: int, code: str) -> None:
    answer = send(door, "/v1/traces", with_metadata(value))
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "value",
    ["[" * 60 + "]" * 60, "18446744073709551615", "-9223372036854775808", "1e308", "5e-324", '"\\u0000ELF"',
     '{"\\u0000": 1}', '"\\ud83d\\ude00"', '{"a\\\\": 1, "b": ":x"}', "0.1234567890123456789012345"],
)  # fmt: skip
def test_what_looks_odd_but_can_be_kept_is_kept_unchanged(door: Api, rows: Engine, value: str) -> None:
    body = with_metadata(value)
    answer = send(door, "/v1/traces", body)
    assert answer.status_code == 201, answer.text
    kept = stored(rows, answer.json()["trace_id"])
    assert kept is not None
    assert read_document(kept["normalised"])["metadata"] == json.loads(body)["metadata"]
    assert read_document(kept["raw"]) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"1",
        b'"x"',
        b"{}",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"{",
        b"{'a': 1}",
        b"\x00" * 100,
    ],
)
def test_a_body_that_is_no_trace_is_refused(door: Api, body: bytes) -> None:
    assert send(door, "/v1/traces", body).status_code in (400, 422)


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"trace_id": "a/../b"}, "/trace_id"),
        ({"trace_id": "a\\b"}, "/trace_id"),
        ({"trace_id": "a\r"}, "/trace_id"),
        ({"trace_id": "a\n"}, "/trace_id"),
        ({"trace_id": "a\u0000"}, "/trace_id"),
        ({"trace_id": "😀"}, "/trace_id"),
        ({"trace_id": ""}, "/trace_id"),
        ({"trace_id": None}, "/trace_id"),
        ({"trace_id": 7}, "/trace_id"),
        ({"trace_id": "x" * 10_240}, "/trace_id"),
        ({"task_id": "a\u0000b"}, "/task_id"),
        ({"session_id": "x" * 501}, "/session_id"),
        ({"messages": []}, "/messages"),
        ({"messages": "hello"}, "/messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "/messages/0/role"),
        ({"messages": [{"role": "user", "content": 5}]}, "/messages/0/content/str"),
        ({"messages": [{"role": "user", "content": [1]}]}, "/messages/0/content/str"),
        ({"policy_version": "0"}, "/policy_version"),
        ({"policy_version": True}, "/policy_version"),
        ({"policy_version": -1}, "/policy_version"),
        ({"policy_version": 2**31}, "/policy_version"),
        ({"policy_version": 1.5}, "/policy_version"),
        ({"sampling": {"temperature": "1"}}, "/sampling/temperature"),
        ({"sampling": {"constrained": "yes"}}, "/sampling/constrained"),
        ({"calls": [{"message_index": 1, "completion_token_ids": [1.5]}]}, "/calls/0/completion_token_ids/0"),
        ({"calls": [{"message_index": 1, "logprobs": ["-1"]}]}, "/calls/0/logprobs/0"),
        ({"calls": [{}]}, "/calls/0/message_index"),
        ({"status": "done"}, "/status"),
        ({"mesages": []}, "/mesages"),
        ({"a/b~c": 1}, "/a~1b~0c"),
        ({"started_at": 1_764_417_600}, "/started_at"),
        ({"started_at": "1764417600000"}, "/started_at"),
        ({"started_at": "2026-11-29"}, "/started_at"),
        ({"started_at": "9999-12-31T23:59:59-05:00"}, "/started_at"),
        ({"started_at": "0001-01-01T00:00:00+05:00"}, "/started_at"),
        ({"started_at": "2026-02-30T00:00:00Z"}, "/started_at"),
    ],
)  # fmt: skip
def test_a_defect_is_named_by_its_pointer(door: Api, change: dict[str, Any], pointer: str) -> None:
    answer = send(door, "/v1/traces", text_of(trace(**change)))
    assert answer.status_code == 422
    assert pointer in [defect["pointer"] for defect in answer.json()["errors"]]


@pytest.mark.parametrize(
    ("moment", "kept", "warned"),
    [
        ("2025-12-11T07:00:00", "2025-12-11T07:00:00+00:00", "no offset, taken as UTC"),
        ("2025-12-11T07:00:00+08:00", "2025-12-10T23:00:00+00:00", ""),
        ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59+00:00", "future_timestamp"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00+00:00", ""),
    ],
)
def test_times_become_utc_and_what_was_assumed_is_said(
    door: Api, rows: Engine, moment: str, kept: str, warned: str
) -> None:
    answer = door.post_trace(trace(started_at=moment))
    assert answer.status_code == 201
    found = stored(rows, answer.json()["trace_id"])
    assert found is not None
    assert read_document(found["normalised"])["started_at"] == kept
    assert [warned in warning for warning in answer.json()["warnings"]] == ([True] if warned else [])


def test_one_instant_spelt_in_two_zones_is_one_trace(door: Api) -> None:
    naive = trace(started_at="2025-12-10T23:00:00")
    assert door.post_trace(naive).status_code == 201
    assert door.post_trace({**naive, "started_at": "2025-12-11T07:00:00+08:00"}).status_code == 200


def test_a_trace_of_33_000_steps_is_taken(door: Api, rows: Engine) -> None:
    steps = [
        message
        for step in range(16_500)
        for message in ({"role": "user", "content": f"step {step}"}, {"role": "assistant", "content": "ok"})
    ]
    call = {"message_index": 32_999, "completion_token_ids": [1, 2]}
    answer = door.post_trace(trace(messages=steps, calls=[call]))
    assert answer.status_code == 201
    kept = stored(rows, answer.json()["trace_id"])
    assert kept is not None
    assert len(read_document(kept["normalised"])["messages"]) == 33_000


def test_misaligned_logprobs_are_stored_with_a_reason_and_not_used(door: Api) -> None:
    call = {
        "message_index": 1,
        "prompt_token_ids": [1],
        "completion_token_ids": [5] * 37,
        "logprobs": [-1.0] * 44,
    }
    verdict = door.post_trace(trace(calls=[call])).json()["trainability"]
    assert verdict == {"verdict": "ids", "reasons": ["logprobs_misaligned"]}


def test_an_image_of_more_than_a_megabyte_is_taken(door: Api) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_200_000}}
    messages = [{"role": "user", "content": [picture]}, {"role": "assistant", "content": "a cat"}]
    assert door.post_trace(trace(messages=messages)).status_code == 201
