"""The JSON reader: its fast way and its strict way agree, and nothing is altered silently."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.errors import YoroError
from service.ingest.formats import jsontext, strictjson

KEYS = st.text(alphabet='ab:\\"\x00é\ud83d\ude00', max_size=4).filter(
    lambda t: t.isprintable() or "\x00" in t
)
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=True)
    | st.text(alphabet='a:\\"{[é \x00\x1b', max_size=8)
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4)
)
STYLES: list[dict[str, Any]] = [
    {}, {"ensure_ascii": False}, {"separators": (",", ":")}, {"indent": 1}, {"separators": (" , ", " : ")},
]  # fmt: skip


def strictly(body: bytes) -> Any:
    """The same, by the strict parser alone."""
    value = strictjson.parse(body, 64)
    strictjson.check_depth(value, 64)
    strictjson.refuse_defects(value)
    return value


def outcome(parse: Any, body: bytes) -> Any:
    try:
        return "value", repr(parse(body))
    except YoroError as error:
        return "error", error.status, error.code


def written(value: Any, style: dict[str, Any]) -> bytes:
    return json.dumps(value, **style).encode("utf-8", "surrogatepass")


@given(VALUES, st.sampled_from(STYLES))
def test_the_fast_way_and_the_strict_way_agree(value: Any, style: dict[str, Any]) -> None:
    body = written(value, style)
    assert outcome(lambda b: jsontext.parse(b, max_depth=64), body) == outcome(strictly, body)


PAIRS = st.lists(st.tuples(KEYS, LEAVES), min_size=1, max_size=5)


@given(PAIRS, st.sampled_from(STYLES), st.booleans())
@example([("a", None), ("\\", None), ("a", ":")], {"separators": (",", ":")}, True)
def test_no_duplicate_key_escapes_the_fast_way(
    pairs: list[tuple[str, Any]], style: dict[str, Any], nested: bool
) -> None:
    colon = style.get("separators", (", ", ": "))[1].encode()
    members = [written(key, style) + colon + written(value, style) for key, value in pairs]
    body = b"{" + b",".join(members) + b"}"
    body = b'{"outer":' + body + b"}" if nested else body
    assert outcome(lambda b: jsontext.parse(b, max_depth=64), body) == outcome(strictly, body)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_clear_error(body: bytes) -> None:
    assert outcome(lambda b: jsontext.parse(b, max_depth=64), body)[0] in ("value", "error")


@given(VALUES)
@example({"\x00\ud83d\ude00": None})
def test_what_is_parsed_is_dumped_without_loss(value: Any) -> None:
    try:
        parsed = jsontext.parse(written(value, {}), max_depth=64)
    except YoroError:
        return
    # The two halves of a surrogate pair, written as escapes one after the other, are one character.
    assert jsontext.load_trusted(jsontext.dump(parsed)) == parsed == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "body",
    [b'{"a":1,"a":1}', b'{"a":1,"\\u0061":1}', b'{"a":1,"b":"\\u003ax","a":2}', b'{"a\\\\":1,"a\\\\":2}',
     b'{"x":":","x":1}', b'{"a":{"b":1},"a":{}}', b'[{"a" :1,"a":2}]', b'{"a"\n:1,"a":2}'],
)  # fmt: skip
def test_tricky_duplicates_are_found(body: bytes) -> None:
    with pytest.raises(YoroError) as raised:
        jsontext.parse(body, max_depth=64)
    assert raised.value.status == 400
    assert "twice" in raised.value.detail


def test_logprobs_with_many_digits_are_no_long_integers() -> None:
    assert jsontext.parse(b'{"l": [-0.00012345678901234567]}', max_depth=64) == {
        "l": [-0.00012345678901234567]
    }
