"""From a validated trace to the rows that the writer stores.

Knows the policy's settings, no database. Invariant: nothing here depends on when or by which door
the trace came, except its arrival number.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zstandard

from service.baselines.features import task_features
from service.ingest.formats import jsontext, native
from service.policies import PolicySettings
from service.schemas import Trace, Trainability

_COMPRESSION_LEVEL = 1


@dataclass(frozen=True, slots=True)
class NewRollout:
    """One trace, ready to be written."""

    policy_id: int
    trace_id: str
    arrival: int
    fingerprint: bytes
    status: str
    task_key: str
    session_id: str | None
    version: int | None
    adapter_sha256: str | None
    trainability: Trainability
    raw: bytes
    normalised: bytes
    features: bytes
    text_digest: bytes
    content_digest: bytes
    opening_digest: bytes
    prompt_digests: bytes
    warnings: tuple[str, ...]


def prepare(trace: Trace, raw: bytes, *, policy_id: int, policy: str, key: bytes) -> NewRollout:
    """Normalise, fingerprint and featurise one trace."""
    document = native.normalise(trace)
    normalised = jsontext.dump(document)
    verdict, reasons = native.structural_verdict(document)
    start = native.first_action(document)
    prompt = document["messages"][:start]
    features = task_features(prompt, document.get("tools", []), document.get("context", {}))
    described = jsontext.dump(
        {
            "text": features.text,
            "prompt_length": features.prompt_length,
            "context": dict(features.context),
        }
    )
    version, warnings = _claimed_version(trace, policy)
    return NewRollout(
        policy_id=policy_id,
        trace_id=trace.trace_id,
        arrival=secrets.randbits(62),
        fingerprint=hmac.digest(key, normalised, "sha256"),
        status=trace.status,
        task_key=_task_key(trace, described),
        session_id=trace.session_id,
        version=version,
        adapter_sha256=trace.adapter_sha256,
        trainability=Trainability(verdict=verdict, reasons=reasons),
        raw=_compress(raw),
        normalised=_compress(normalised),
        features=_compress(described),
        text_digest=_digest(features.text.encode()),
        content_digest=_digest(jsontext.dump(document["messages"])),
        opening_digest=_digest(jsontext.dump(document["messages"][: start + 1])),
        prompt_digests=_prompt_digests(prompt),
        warnings=(
            *warnings,
            *native.time_warnings("/started_at", trace.started_at),
            *native.time_warnings("/ended_at", trace.ended_at),
        ),
    )


def read_document(stored: bytes) -> dict[str, Any]:
    """Return the JSON document behind a stored column."""
    document: dict[str, Any] = jsontext.load_trusted(zstandard.ZstdDecompressor().decompress(stored))
    return document


def exclusion(status: str, trainability: Trainability, settings: PolicySettings) -> str:
    """Return why a rollout can never be trained as it stands, or an empty string."""
    if trainability.verdict == "untrainable":
        return f"untrainable:{trainability.reasons[0]}"
    handling: Mapping[str, str] = settings.statuses.model_dump()
    return "failed_rollout" if handling.get(status) == "exclude" else ""


def _claimed_version(trace: Trace, policy: str) -> tuple[int | None, list[str]]:
    """Read the version from the first of policy_version, calls (the oldest), `model: {policy}-v{n}`."""
    called = [call.policy_version for call in trace.calls if call.policy_version is not None]
    if trace.policy_version is not None or called:
        stated = [*called, *([] if trace.policy_version is None else [trace.policy_version])]
        return min(stated), []
    prefix, _, number = (trace.model or "").rpartition("-v")
    if prefix == policy and number.isdecimal() and len(number) < 10:
        return int(number), []
    return None, [f"/model: {trace.model!r} does not name a version of {policy}"] if trace.model else []


def _task_key(trace: Trace, described: bytes) -> str:
    return f"id:{trace.task_id}" if trace.task_id else f"features:{_digest(described).hex()}"


def _prompt_digests(prompt: list[dict[str, Any]]) -> bytes:
    """Digest, one after the other, every conversation that the prompt contains: its prefixes that end with an assistant turn."""
    ends = [index for index, message in enumerate(prompt) if message["role"] == "assistant"]
    return b"".join(_digest(jsontext.dump(prompt[: end + 1])) for end in ends)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(data)
