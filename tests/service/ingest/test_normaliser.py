"""The normaliser: any trace in, one document out; what travelled differently but says the same is one."""

from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.database.documents import read_document
from service.errors import Invalid
from service.ingest import rollouts
from service.ingest.formats import jsontext, native
from service.ingest.rollouts import NewRollout
from service.policies import PolicySettings
from service.schemas import Trace
from tests.documents import trace

TEXT = st.text(max_size=12).filter(lambda text: text.encode("utf-8", "replace").decode() == text)
LABEL = st.text(alphabet="aé:/ 漢", min_size=1, max_size=6)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": st.none() | TEXT | st.lists(OBJECT, max_size=2),
        "tool_calls": st.none() | st.lists(OBJECT, max_size=2),
        "name": JSON,
        "reasoning_content": TEXT,
    },
)
NUMBER = st.floats(0, 2, allow_nan=False) | st.integers(0, 2)
CALL = st.fixed_dictionaries(
    {"message_index": st.integers(0, 5)},
    optional={
        "prompt_token_ids": st.none() | st.lists(st.integers(0, 9), max_size=3),
        "completion_token_ids": st.lists(st.integers(0, 9), max_size=3),
        "logprobs": st.lists(st.none() | st.floats(-9, 0) | st.integers(-9, 0), max_size=3),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
        "policy_version": st.integers(0, 3),
        "temperature": NUMBER,
        "top_k": st.integers(-1, 5),
    },
)
MOMENT = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.none() | st.timezones())  # noqa: DTZ001
DOCUMENT = st.fixed_dictionaries(
    {"trace_id": st.just("t"), "messages": st.lists(MESSAGE, min_size=1, max_size=4)},
    optional={
        "policy": st.just("support"),
        "policy_version": st.none() | st.integers(0, 5),
        "model": LABEL,
        "task_id": LABEL,
        "session_id": st.none() | LABEL,
        "tools": st.lists(OBJECT, max_size=2),
        "context": OBJECT,
        "sampling": st.fixed_dictionaries({}, optional={"temperature": NUMBER, "constrained": st.booleans()}),
        "calls": st.lists(CALL, max_size=2),
        "status": st.sampled_from(["completed", "failed", "aborted", "truncated"]),
        "started_at": MOMENT,
        "metadata": OBJECT,
    },
)


def prepared(document: Any, **more: Any) -> NewRollout:
    body = jsontext.as_sent(document)
    parsed = jsontext.parse(body, max_depth=64)
    return rollouts.prepare(
        native.validate(Trace, parsed), body, policy_id=1, policy="support", key=b"k" * 32, **more
    )


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENT)
def test_every_valid_trace_is_prepared_and_kept_whole(document: dict[str, Any]) -> None:
    sent = jsontext.as_sent(document)
    try:
        new = prepared(document)
    except Invalid:  # a zone of odd seconds
        return
    columns = new.columns()
    assert read_document(columns.raw) == jsontext.load_trusted(sent)
    again = {**read_document(columns.normalised), "policy": "support"}
    assert prepared(again).columns().normalised == columns.normalised, "normalising twice changes nothing"
    assert prepared(again).columns().fingerprint == columns.fingerprint


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENT)
def test_the_canonical_form_is_pydantics_without_defaults(document: dict[str, Any]) -> None:
    """The hand-written canonicaliser, against the slow one that it replaced."""
    document.pop("started_at", None)
    parsed = native.validate(Trace, jsontext.load_trusted(jsontext.as_sent(document)))
    slow = parsed.model_dump(mode="json", exclude={"policy", "reward"}, exclude_defaults=True)
    assert jsontext.dump(native.normalise(parsed)) == jsontext.dump(slow)


@given(st.binary(max_size=80), DOCUMENT, st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_cut_or_overwritten_document_is_an_error_or_a_trace(
    noise: bytes, document: dict[str, Any], data: st.DataObject
) -> None:
    body = jsontext.as_sent(document)
    at = data.draw(st.integers(0, len(body)))
    damaged = body[:at] + noise + body[at + len(noise) :]
    with suppress(Invalid):  # 400 and 422 alike; anything else is a defect of ours
        native.normalise(native.validate(Trace, jsontext.parse(damaged, max_depth=64)))


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "support"}, {"reward": {"grader": "g", "value": 1}}, {"tools": []}, {"context": {}},
        {"session_id": None}, {"status": "completed"}, {"calls": []}, {"sampling": {}},
        {"started_at": "2026-01-01T01:00:00+01:00"},
    ],
)  # fmt: skip
def test_how_a_trace_travelled_does_not_change_its_fingerprint(change: dict[str, Any]) -> None:
    plain = trace(started_at="2026-01-01T00:00:00Z")
    del plain["policy"]
    assert prepared({**plain, **change}).columns().fingerprint == prepared(plain).columns().fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"policy_version": 1}, {"task_id": "t"}, {"status": "failed"}, {"metadata": {"a": 1}},
        {"metadata": {"a": 1.0}}, {"metadata": {"a": None}}, {"sampling": {"temperature": 0}},
    ],
)  # fmt: skip
def test_what_a_trace_says_changes_its_fingerprint(change: dict[str, Any]) -> None:
    assert prepared({**trace(trace_id="t"), **change}).columns().fingerprint != (
        prepared(trace(trace_id="t")).columns().fingerprint
    )


def test_a_prompt_of_many_turns_is_digested_in_time_that_grows_with_its_length() -> None:
    """Every prefix that ends with an assistant turn has a digest; hashing each anew would be quadratic."""
    turns = [{"role": role, "content": "x" * 200} for _ in range(8_000) for role in ("user", "assistant")]
    new = prepared(trace(messages=turns, calls=[{"message_index": 15_999}]))
    assert len(new.columns().prompt_digests) == 32 * 7_999


def test_a_failed_trace_is_kept_from_training_as_the_policy_says() -> None:
    settings = PolicySettings.model_validate({"base_model": "smollm2-135m", "statuses": {"aborted": "train"}})
    assert prepared(trace(status="failed"), settings=settings).excluded_as == "failed_rollout"
    assert prepared(trace(status="aborted"), settings=settings).excluded_as == ""
