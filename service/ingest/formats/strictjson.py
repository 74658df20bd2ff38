"""The strict JSON parser: slower than orjson, and able to say where a document breaks which rule.

A defect inside the document does not end the parse: it stands in its place as a `Defect`, so that
one bad item of a batch costs its neighbours nothing.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import orjson

from service.errors import FieldError, Invalid, Malformed

_BEYOND_64_BITS = 1 << 64
_LONGEST_INTEGER = 20
"""Digits of 2**64; longer texts are never converted, which would take quadratic time."""


class Defect:
    """A value that JSON cannot say, or that we could not keep unchanged.

    Not a dataclass, which orjson would write out as an object.
    """

    __slots__ = ("is_number", "message")

    def __init__(self, message: str, *, is_number: bool = False) -> None:
        """Take the reason; `is_number`: the document is invalid (422) rather than malformed (400)."""
        self.message = message
        self.is_number = is_number


def parse(body: bytes, max_depth: int) -> Any:
    """Parse; defects stand in their places. Raises Malformed where the text is no JSON at all."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"The body is not UTF-8 at byte {error.start}") from error
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise Malformed(f"The body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise too_deep(max_depth) from error


def refuse_defects(value: Any) -> None:
    """Raise Malformed, or Invalid for a number, where a parsed value holds a defect or a lone surrogate."""
    try:
        orjson.dumps(value)  # fails for exactly these, much faster than a walk
    except TypeError:
        pointer, defect = _first_defect(value) or ("", Defect("cannot be kept unchanged"))
        fields = [FieldError(pointer, defect.message)]
        detail = f"{pointer}: {defect.message}"
        raise (Invalid(detail, fields, "number") if defect.is_number else Malformed(detail, fields)) from None


def check_depth(value: Any, max_depth: int) -> None:
    """Raise Invalid where a value nests deeper than `max_depth`."""
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
    if level:
        raise too_deep(max_depth)


def too_deep(max_depth: int) -> Invalid:
    """Return the error of a document that nests too deeply."""
    return Invalid(f"The document nests deeper than {max_depth} levels", code="json_depth")


def pointer_step(step: object) -> str:
    """Return one step of a JSON pointer (RFC 6901), shortened, printable whatever a client sent."""
    plain = str(step)[:100].replace("~", "~0").replace("/", "~1")
    return plain.encode("ascii", "backslashreplace").decode().replace("\x00", "\\x00")


def _first_defect(value: Any) -> tuple[str, Defect] | None:
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        pointer, found = pending.pop()
        defect = found if isinstance(found, Defect) else _surrogate(found) if isinstance(found, str) else None
        if defect is not None:
            return pointer, defect
        pending.extend(reversed([*_inner(pointer, found)]))
    return None


def _inner(pointer: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if (defect := _surrogate(key)) is not None:
                yield f"{pointer}/{pointer_step(key)}", defect
            yield f"{pointer}/{pointer_step(key)}", inner
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield f"{pointer}/{index}", inner


def _surrogate(text: str) -> Defect | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Defect(f"a lone surrogate at character {error.start} is not Unicode text")
    return None


def _unique(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        return Defect(f"key {pointer_step(twice)!r} stands twice in one object")
    return found


def _constant(name: str) -> Defect:
    return Defect(f"{name} is not JSON", is_number=True)


def _finite(digits: str) -> float | Defect:
    number = float(digits)
    return Defect(f"number {digits[:50]} overflows", is_number=True) if math.isinf(number) else number


def _integer(digits: str) -> int | Defect:
    number = int(digits) if len(digits) <= _LONGEST_INTEGER else _BEYOND_64_BITS
    if not -(_BEYOND_64_BITS >> 1) <= number < _BEYOND_64_BITS:
        return Defect(f"integer {digits[:50]} is beyond 64 bits: send it as a string", is_number=True)
    return number
