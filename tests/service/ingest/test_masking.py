"""Masks: nothing unmasked is stored, retries stay duplicates, token ids do not spell what was masked."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from service.database.documents import read_document
from service.database.engine import transaction
from service.errors import Unavailable, YoroError
from service.ingest import masking, rollouts
from service.ingest.formats import jsontext, native
from service.ingest.rollouts import NewRollout
from service.ingest.writer import Writer
from service.policies import Masking, PolicySettings
from service.schemas import Trace, TraceAccepted
from tests.conftest import MakePolicy
from tests.documents import trace

SECRET = "ann@example.org"
CALL = {"message_index": 1, "prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-1.0]}
EMAIL = {"patterns": [{"pattern": r"[\w.]+@[\w.]+\w", "replacement": "<email>"}]}


def shout(value: str) -> str:
    """A named function, as an operator would install one."""
    return value.replace("ann", "ANN")


def fail(_: str) -> str:
    raise RuntimeError("no")


def prepared(document: dict[str, Any], rules: dict[str, Any], policy_id: int = 1) -> NewRollout:
    settings = PolicySettings.model_validate({"base_model": "smollm2-135m", "masking": rules})
    body = jsontext.as_sent(document)
    return rollouts.prepare(
        native.validate(Trace, document), body, policy_id=policy_id, policy="support", key=b"k" * 32,
        settings=settings, mask=masking.compiled(settings.masking, {"shout": shout, "fail": fail}),
    )  # fmt: skip


def everywhere() -> dict[str, Any]:
    return trace(
        trace_id="t",
        messages=[
            {"role": "user", "content": f"I am {SECRET}", "name": SECRET},
            {"role": "assistant", "content": [{"type": "text", "text": f"hello {SECRET}"}],
             "tool_calls": [{"function": {"arguments": f'{{"to": "{SECRET}"}}'}}]},
        ],
        context={SECRET: 1}, metadata={"deep": [{"er": SECRET}]},
        tools=[{"name": "x", "description": SECRET}],
        session_id=SECRET, task_id=f"{SECRET} 1",
        calls=[CALL],
    )  # fmt: skip


def test_nothing_unmasked_is_left_in_any_column() -> None:
    new = prepared(everywhere(), EMAIL)
    columns = new.columns()
    kept = [
        jsontext.dump(read_document(column)) for column in (columns.raw, columns.normalised, columns.features)
    ]
    assert not any(SECRET.encode() in text for text in kept)
    assert SECRET not in f"{new.session_id} {columns.task_key}"
    assert b"<email>" in kept[0]


def test_a_masked_trace_loses_its_token_ids_and_is_not_trained() -> None:
    new = prepared(everywhere(), EMAIL)
    (call,) = read_document(new.columns().raw)["calls"]
    assert call == {"message_index": 1}
    assert (new.trainability.verdict, new.trainability.reasons) == ("untrainable", ["masked"])
    assert any("masks" in warning for warning in new.warnings)


def test_a_policy_may_train_the_masked_text() -> None:
    new = prepared(everywhere(), {**EMAIL, "altered": "train_text"})
    assert (new.trainability.verdict, new.trainability.reasons) == ("text", ["masked"])


def test_a_trace_that_no_mask_touches_is_as_without_masks() -> None:
    document = trace(calls=[{"message_index": 1, "prompt_token_ids": [1], "completion_token_ids": [2]}])
    assert prepared(document, EMAIL).columns().normalised == prepared(document, {}).columns().normalised
    assert prepared(document, EMAIL).trainability == prepared(document, {}).trainability


def test_equal_ids_stay_equal_and_different_ones_different() -> None:
    def session(name: str) -> str | None:
        return prepared(trace(session_id=name), EMAIL).session_id

    assert session(SECRET) == session(SECRET) != session("bob@example.org")
    assert session("plain") == "plain"


def test_keys_that_become_equal_are_both_kept() -> None:
    new = prepared(trace(metadata={"a@b.c": 1, "d@e.f": 2}), EMAIL)
    assert read_document(new.columns().raw)["metadata"] == {"<email>": 1, "<email>#2": 2}


def test_roles_are_structure_and_never_masked() -> None:
    new = prepared(trace(), {"patterns": [{"pattern": "user|assistant|yes"}]})
    messages = read_document(new.columns().raw)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["content"] == "[masked]"


def test_a_named_function_masks_after_the_patterns() -> None:
    new = prepared(trace(metadata={"x": "ann"}), {"function": "shout"})
    assert read_document(new.columns().raw)["metadata"] == {"x": "ANN"}


def test_a_function_that_this_server_lacks_stops_intake_rather_than_masking_less() -> None:
    with pytest.raises(Unavailable):
        prepared(trace(), {"function": "absent"})


def test_a_function_that_fails_stores_nothing() -> None:
    with pytest.raises(YoroError) as raised:
        prepared(trace(), {"function": "fail"})
    assert (raised.value.status, raised.value.code) == (422, "mask")


def test_a_replacement_is_literal() -> None:
    new = prepared(
        trace(metadata={"x": "a1"}), {"patterns": [{"pattern": r"(\d)", "replacement": r"\1\g<0>"}]}
    )
    assert read_document(new.columns().raw)["metadata"] == {"x": r"a\1\g<0>"}


def test_a_pattern_that_does_not_compile_is_refused_with_the_settings() -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        Masking.model_validate({"patterns": [{"pattern": "("}]})


def test_functions_are_found_by_the_names_of_the_server_settings() -> None:
    found = masking.load_functions({"shout": f"{__name__}:shout"})
    assert found["shout"]("ann") == "ANN"


@given(st.text(alphabet="an@e.x ", max_size=30))
def test_masking_is_the_same_whoever_asks_and_however_often(value: str) -> None:
    mask = masking.compiled(Masking.model_validate(EMAIL), {})
    assert mask is not None
    assert mask.text(value) == mask.text(value)


def test_a_new_mask_turns_no_retry_into_a_conflict(engine: Engine, make_policy: MakePolicy) -> None:
    policy = make_policy()
    writer = Writer(engine)
    statuses = []
    for rules in ({}, EMAIL, {"function": "shout"}):
        (outcome,) = writer.write([prepared(everywhere(), rules, policy.id)])
        assert isinstance(outcome, TraceAccepted)
        statuses.append(outcome.status)
    assert statuses == ["accepted", "duplicate", "duplicate"]
    with transaction(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM rollout_documents")).scalar_one() == 1
