"""JSON text to Python values, refusing whatever would be altered silently.

Knows nothing of traces. Refused with a reason: NaN, Infinity and numbers that overflow to it, duplicate
keys, integers beyond 64 bits, lone surrogates, bytes that are not UTF-8, nesting beyond the limit.
"""

import json
import math
import re
from typing import Any

import orjson

from service.errors import Invalid, Malformed

_HUGE_EXPONENT = re.compile(rb"[eE]\+?\d{3}")


def parse(body: bytes, *, max_depth: int) -> Any:
    """Parse one JSON document. Raises Malformed (400), or Invalid (422) for depth."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"The body is not UTF-8 at byte {error.start}") from error
    hooks: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _refuse_constant}
    if _HUGE_EXPONENT.search(body):
        hooks["parse_float"] = _finite
    try:
        value = json.loads(text, **hooks)
    except json.JSONDecodeError as error:
        raise Malformed(f"The body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    _check_depth(value, max_depth)
    return value


def dump(value: Any) -> bytes:
    """Serialise canonically: sorted keys, no spaces, UTF-8. Raises Malformed for what JSON cannot say."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError) as error:  # orjson's error is a TypeError
        raise Malformed(f"The document cannot be stored unchanged: {error}") from error


def load_trusted(stored: bytes) -> Any:
    """Parse what `dump` made."""
    return orjson.loads(stored)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Malformed(f"Key {twice[:100]!r} stands twice in one object")
    return found


def _refuse_constant(name: str) -> float:
    raise Malformed(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise Malformed(f"Number {digits[:50]} overflows")
    return number


def _check_depth(value: Any, max_depth: int) -> None:
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(max_depth):
        if not level:
            return
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> Invalid:
    return Invalid(f"The document nests deeper than {max_depth} levels", code="too_deep")
