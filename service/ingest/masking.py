"""Masks: what a policy removes from documents before anything is stored.

Knows no database. Invariants: the fingerprint is made before masking, so a new mask turns no retry into
a conflict; ids that a mask touches become keyed pseudonyms, so that equal ids stay equal; a trace that
a mask changed loses its token ids, which would spell what was masked.
"""

import hmac
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from service.errors import Invalid, Unavailable
from service.policies import Masking

MaskFunction = Callable[[str], str]
_TEXTS = ("messages", "tools", "context", "metadata")
_SPELT = ("messages", "tools")
"""What the token ids of a call spell."""
_NAMES = ("task_id", "session_id", "model")
_TOKENS = ("prompt_token_ids", "completion_token_ids", "logprobs")


@dataclass(frozen=True, slots=True)
class Mask:
    """One policy's masks, compiled."""

    patterns: tuple[tuple[re.Pattern[str], str], ...]
    function: MaskFunction | None
    missing: str = ""
    """Name of a function that this server does not have: nothing can be taken in until it does."""

    def trace(self, document: dict[str, Any], key: bytes) -> tuple[dict[str, Any], bool]:
        """Return a masked copy of a trace document, and whether anything was changed."""
        masked = dict(document)
        for name in _TEXTS:
            if name in document:
                masked[name] = self.value(document[name])
        if "messages" in document:
            masked["messages"] = _with_roles(masked["messages"], document["messages"])
        for name in _NAMES:
            if isinstance(document.get(name), str):
                masked[name] = self._pseudonym(document[name], key)
        altered = any(masked.get(name) != document.get(name) for name in _SPELT)
        if altered and document.get("calls"):
            masked["calls"] = [_without_tokens(call) for call in document["calls"]]
        if isinstance(document.get("reward"), dict):
            masked["reward"] = {
                name: self.value(value) if name == "comment" else value
                for name, value in document["reward"].items()
            }
        return masked, altered

    def value(self, value: Any) -> Any:
        """Return a masked copy of any JSON value; keys are masked as well."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(inner) for inner in value]
        if isinstance(value, dict):
            return _keyed([(self.text(name), self.value(inner)) for name, inner in value.items()])
        return value

    def text(self, text: str) -> str:
        """Return a masked string. Raises Unavailable or Invalid where a function is missing or fails."""
        if self.missing:
            raise Unavailable(f"This server has no mask function {self.missing!r}", code="mask_missing")
        for pattern, replacement in self.patterns:
            text = pattern.sub(replacement, text)
        return text if self.function is None else _called(self.function, text)

    def _pseudonym(self, name: str, key: bytes) -> str:
        if self.text(name) == name:
            return name
        return f"masked:{hmac.digest(key, name.encode(), 'sha256').hex()[:32]}"


def compiled(settings: Masking, functions: Mapping[str, MaskFunction]) -> Mask | None:
    """Return the policy's mask; None when it masks nothing."""
    if not settings.patterns and settings.function is None:
        return None
    patterns = tuple((re.compile(mask.pattern), _literal(mask.replacement)) for mask in settings.patterns)
    name = settings.function or ""
    return Mask(patterns, functions.get(name), "" if name in functions else name)


def _literal(replacement: str) -> str:
    """Return a template for `re.sub` that stands for the text itself."""
    return replacement.replace("\\", "\\\\")


def load_functions(names: Mapping[str, str]) -> dict[str, MaskFunction]:
    """Import the functions that server settings name as `module:function`. Raises at start, not at intake."""
    found = {}
    for name, path in names.items():
        module, _, function = path.partition(":")
        found[name] = cast(MaskFunction, getattr(importlib.import_module(module), function))
    return found


def _called(function: MaskFunction, text: str) -> str:
    try:
        return str(function(text))
    except Exception as error:
        raise Invalid(
            "The policy's mask function failed on this document; nothing was stored", code="mask"
        ) from error


def _with_roles(masked: list[Any], messages: list[Any]) -> list[Any]:
    """Put the messages' roles back: they are structure, whatever a pattern says."""
    return [
        new | {"role": old["role"]} if isinstance(old, dict) and "role" in old else new
        for new, old in zip(masked, messages, strict=True)
    ]


def _keyed(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of masked keys; keys that have become equal are numbered, none is lost."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        free, number = name, 2
        while free in found:
            free, number = f"{name}#{number}", number + 1
        found[free] = value
    return found


def _without_tokens(call: Any) -> Any:
    return {name: value for name, value in call.items() if name not in _TOKENS}
