"""yoro's own JSON: from a parsed document to the normalised one, with its structural verdict.

Knows no database, no policy settings and no tokenizer: the verdict is provisional (design/training.md).
The normalised document holds what the agent said and nothing about how it travelled, so that HTTP
and Kafka deliveries of one trace agree. A change to it is a new function with a new number in
CANONICALISERS; the old ones stay, or honest retries would turn into conflicts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from service.errors import FieldError, Invalid
from service.ingest.formats.strictjson import pointer_step
from service.schemas import Message, Trace, has_token_ids

SKEW = timedelta(days=1)
Verdict = Literal["exact", "ids", "text", "untrainable"]
WireType = TypeVar("WireType", bound=BaseModel)
_TRANSPORT = {"policy", "reward"}
_WORKED_ON = _TRANSPORT | {
    "policy_version", "messages", "sampling", "calls", "status", "started_at", "ended_at",
}  # fmt: skip


def validate(wire: type[WireType], document: Any) -> WireType:
    """Check a document against a wire type. Raises Invalid with a JSON pointer a defect."""
    try:
        return wire.model_validate(document)
    except ValidationError as error:
        raise invalid(error) from error


def invalid(error: ValidationError) -> Invalid:
    """Return pydantic's findings as our error: a JSON pointer and a message each, the first twenty."""
    defects = [
        FieldError("".join(f"/{pointer_step(step)}" for step in defect["loc"]), defect["msg"])
        for defect in error.errors(include_url=False, include_input=False)[:20]
    ]
    return Invalid("; ".join(f"{defect.pointer}: {defect.message}" for defect in defects[:3]), defects)


def _without_defaults(trace: Trace) -> dict[str, Any]:
    """Leave out defaults and transport fields, put times in UTC."""
    document: dict[str, Any] = {
        name: value for name, value in trace.__dict__.items() if name not in _WORKED_ON and value
    }
    if trace.policy_version is not None:  # 0 is a version
        document["policy_version"] = trace.policy_version
    document["messages"] = [_message(message) for message in trace.messages]
    if sampling := _given(trace.sampling):
        document["sampling"] = sampling
    if trace.calls:
        document["calls"] = [_given(call) for call in trace.calls]
    if trace.status != "completed":
        document["status"] = trace.status
    for name, moment in (("started_at", trace.started_at), ("ended_at", trace.ended_at)):
        if moment is not None:
            document[name] = in_utc(moment).isoformat()
    return document


def _message(message: Message) -> dict[str, Any]:
    return _given(message) | (message.model_extra or {})


def _given(part: BaseModel) -> dict[str, Any]:
    return {name: value for name, value in part.__dict__.items() if value is not None}


CANONICALISERS: Mapping[int, Callable[[Trace], dict[str, Any]]] = {1: _without_defaults}
CANONICALISER = max(CANONICALISERS)
"""Version of `normalise`; stored with each fingerprint."""


def normalise(trace: Trace, version: int = CANONICALISER) -> dict[str, Any]:
    """Return the canonical document, as the newest or an older canonicaliser makes it."""
    return CANONICALISERS[version](trace)


def in_utc(moment: datetime) -> datetime:
    """Return the instant in UTC; a time without an offset is taken as UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def time_warnings(pointer: str, moment: datetime | None) -> list[str]:
    """Say what was assumed or doubted about a client's timestamp."""
    if moment is None:
        return []
    warnings = [] if moment.tzinfo else [f"{pointer}: no offset, taken as UTC"]
    if in_utc(moment) > datetime.now(UTC) + SKEW:
        warnings.append(f"{pointer}: future_timestamp")
    return warnings


def structural_verdict(document: Mapping[str, Any]) -> tuple[Verdict, list[str]]:
    """Judge what training can use of a normalised document; reasons say why it is not better."""
    messages = document["messages"]
    calls = document.get("calls", [])
    if not any(message["role"] == "assistant" for message in messages):
        return "untrainable", ["no_assistant_turn"]
    if any(_misplaced(call, messages) for call in calls):
        return "untrainable", ["call_misplaced"]
    if any(_distorted(sampling) for sampling in (document.get("sampling", {}), *calls)):
        return "untrainable", ["sampling"]
    if not calls:
        return "text", []
    if not all(map(has_token_ids, calls)):
        return "text", ["token_ids_incomplete"]
    reasons = sorted({reason for call in calls for reason in _logprob_defects(call, document)})
    return ("ids", reasons) if reasons else ("exact", [])


def _misplaced(call: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    index: int = call["message_index"]
    return index >= len(messages) or bool(messages[index]["role"] != "assistant")


def _distorted(sampling: Mapping[str, Any]) -> bool:
    """Tell whether tokens came from a truncated or greedy distribution, outside the policy's support."""
    return bool(
        sampling.get("temperature") == 0
        or sampling.get("top_p", 1.0) < 1.0
        or sampling.get("top_k", 0) > 0
        or sampling.get("constrained", False)
    )


def _logprob_defects(call: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    logprobs = call.get("logprobs")
    if not logprobs:
        return ["logprobs_missing"]
    if len(logprobs) != len(call["completion_token_ids"]):
        return ["logprobs_misaligned"]
    if any(value is None or not math.isfinite(value) or value > 1e-6 for value in logprobs):
        return ["logprobs_not_finite"]
    temperature = call.get("temperature", document.get("sampling", {}).get("temperature", 1.0))
    if call.get("logprobs_mode", "raw") == "raw" and temperature != 1.0:
        return ["logprobs_raw_at_other_temperature"]
    return []
