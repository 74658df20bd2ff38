"""JSON text to Python values, refusing whatever would be altered silently.

Knows nothing of traces. Refused with a reason and a JSON pointer: NaN, Infinity and numbers that
overflow to it, duplicate keys, integers beyond 64 bits, lone surrogates, bytes that are not UTF-8,
nesting beyond the limit. Invariant: what `parse` returns, `dump` writes without loss.
"""

import re
from typing import Any

import orjson

from service.errors import Malformed
from service.ingest.formats import strictjson

_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19
"""Digits from which on an integer may lie beyond 64 bits."""
_LONG_INTEGER = re.compile(rb"(?<![0-9.])0{19}")
_SPACED_COLON = re.compile(rb'"[ \t\r\n]+:')


def parse(body: bytes, *, max_depth: int) -> Any:
    """Parse one JSON document. Raises Malformed (400), or Invalid (422) for depth and for numbers."""
    value = _parse_fast(body)
    if value is None:
        value = strictjson.parse(body, max_depth)
        strictjson.check_depth(value, max_depth)
        strictjson.refuse_defects(value)
    elif _may_exceed(body, max_depth):
        strictjson.check_depth(value, max_depth)
    return value


def parse_many(body: bytes, *, max_depth: int) -> Any:
    """Parse a document of many items; `sent` then judges each item on its own."""
    value = _parse_fast(body)
    return strictjson.parse(body, max_depth) if value is None else value


def sent(item: Any, *, max_depth: int) -> bytes:
    """Return one item of `parse_many` as JSON, keys in the order in which they came. Raises like `parse`."""
    try:
        text = orjson.dumps(item)
    except TypeError:
        text = b""
    if not text or _may_exceed(text, max_depth):
        strictjson.check_depth(item, max_depth)
        strictjson.refuse_defects(item)
    return _exact(text)


def dump(value: Any) -> bytes:
    """Serialise canonically: sorted keys, no spaces, UTF-8. Raises Malformed for what JSON cannot say."""
    try:
        return _exact(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
    except (TypeError, ValueError) as error:  # orjson's error is a TypeError
        raise Malformed(f"The document cannot be stored unchanged: {error}") from error


def as_sent(value: Any) -> bytes:
    """Serialise a parsed document, keys in the order in which they came."""
    return orjson.dumps(value)


def load_trusted(stored: bytes) -> Any:
    """Parse what `dump` made."""
    return orjson.loads(stored)


def _parse_fast(body: bytes) -> Any:
    """Parse with orjson where nothing can have been lost; None where the strict parser must look.

    orjson refuses NaN, overflow, lone surrogates and bad UTF-8, but keeps the last of duplicate keys
    and rounds huge integers. Both are excluded by comparing what came with what was understood.
    """
    try:
        value = orjson.loads(body)
        understood = orjson.dumps(value)
    except (TypeError, ValueError):  # orjson's errors: one of each
        return None
    if understood == body:
        return value
    return value if _has_no_long_integer(body) and _has_same_keys(body, understood) else None


def _has_no_long_integer(body: bytes) -> bool:
    alike = body.translate(_DIGITS_ALIKE)
    # The substring search is twenty times faster and says no for nearly all documents.
    return _LONG_NUMBER not in alike or _LONG_INTEGER.search(alike) is None


def _has_same_keys(body: bytes, understood: bytes) -> bool:
    r"""Tell whether both texts have equally many keys, without parsing; False where that is unclear.

    `":` follows every key and every string that begins with a colon; `\":` is text. A key that was
    dropped can only lower the count, provided that no escape hides a colon, no key ends in a backslash
    and no space parts a key from its colon.
    """
    if b"\\u003a" in body or b"\\u003A" in body or b'\\\\":' in body or _SPACED_COLON.search(body):
        return False
    return body.count(b'":') - body.count(b'\\":') == understood.count(b'":') - understood.count(b'\\":')


def _exact(text: bytes) -> bytes:
    """Return a copy of the right size: orjson's bytes keep its buffer, 5 KB for the shortest message."""
    return bytes(memoryview(text))


def _may_exceed(text: bytes, max_depth: int) -> bool:
    return text.count(b"{") + text.count(b"[") > max_depth
