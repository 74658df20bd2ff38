"""From a validated trace to the rows that the writer stores.

Knows the policy's settings, no database. Invariant: nothing here depends on when or by which door
the trace came, except its arrival number.
"""

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import zstandard

from service.baselines.features import first_action, task_features
from service.eligibility import Statuses
from service.ingest.formats import jsontext, native
from service.ingest.grades import NewGrade
from service.ingest.masking import Mask
from service.policies import PolicySettings
from service.schemas import Trace, Trainability

_COMPRESSION_LEVEL = 1
_local = threading.local()


@dataclass(frozen=True, slots=True)
class Columns:
    """What is hashed and compressed of a trace."""

    fingerprint: bytes
    task_key: str
    raw: bytes
    normalised: bytes
    features: bytes
    text_digest: bytes
    content_digest: bytes
    opening_digest: bytes
    prompt_digests: bytes


@dataclass(frozen=True, slots=True)
class NewRollout:
    """One trace, ready to be written, with the grade that it carries."""

    policy_id: int
    trace_id: str
    arrival: int
    canonicaliser: int
    fingerprint_by: Callable[[int], bytes]
    """The fingerprint that a canonicaliser gives: stored rows keep theirs through upgrades."""
    columns: Callable[[], Columns]
    """Hashes and compresses; the writer's thread calls it, so that it runs beside the event loop."""
    status: str
    session_id: str | None
    version: int | None
    adapter_sha256: str | None
    trainability: Trainability
    excluded_as: str
    """Why its status keeps it from training; empty if it does not."""
    warnings: tuple[str, ...]
    grade: NewGrade | None = None
    metered: bool = False
    """Whether its policy has quotas, so that the writer counts it."""


def prepare(
    trace: Trace,
    raw: bytes,
    *,
    policy_id: int,
    policy: str,
    key: bytes,
    settings: PolicySettings | None = None,
    mask: Mask | None = None,
    grade: NewGrade | None = None,
) -> NewRollout:
    """Normalise and mask one trace, and find what the writer needs to know of it."""
    document = native.normalise(trace)
    said = jsontext.dump(document)
    kept, altered = trace, False
    if mask is not None:
        kept, raw, altered = _masked(raw, mask, key)
        document = native.normalise(kept)
    version, version_warnings = _claimed_version(trace, policy)
    statuses = Statuses() if settings is None else settings.statuses
    return NewRollout(
        policy_id=policy_id,
        trace_id=trace.trace_id,
        arrival=secrets.randbits(62),
        canonicaliser=native.CANONICALISER,
        fingerprint_by=partial(_fingerprint, key, said),
        columns=partial(_columns, key, said, raw, _texts(document, said if mask is None else None)),
        status=trace.status,
        session_id=kept.session_id,
        version=version,
        adapter_sha256=trace.adapter_sha256,
        trainability=_trainability(document, altered, settings),
        excluded_as="failed_rollout" if _handling(statuses, trace.status) == "exclude" else "",
        warnings=(
            *version_warnings,
            *native.time_warnings("/started_at", trace.started_at),
            *native.time_warnings("/ended_at", trace.ended_at),
            *(["/messages: changed by the policy's masks, token ids left out"] if altered else []),
        ),
        grade=grade,
        metered=settings is not None and settings.quotas.traces_per_day is not None,
    )


def _masked(raw: bytes, mask: Mask, key: bytes) -> tuple[Trace, bytes, bool]:
    """Mask the document as it came; the raw text is then that of the masked document."""
    masked, altered = mask.trace(jsontext.load_trusted(raw), key)
    return native.validate(Trace, masked), jsontext.as_sent(masked), altered


def _trainability(document: dict[str, Any], altered: bool, settings: PolicySettings | None) -> Trainability:
    verdict, reasons = native.structural_verdict(document)
    if altered and verdict != "untrainable":
        exclude = settings is None or settings.masking.altered == "exclude"
        return Trainability(verdict="untrainable" if exclude else "text", reasons=["masked"])
    return Trainability(verdict=verdict, reasons=reasons)


def _handling(statuses: Statuses, status: str) -> str:
    handling: Mapping[str, str] = statuses.__dict__
    return handling.get(status, "train")


def _claimed_version(trace: Trace, policy: str) -> tuple[int | None, list[str]]:
    """Read the version from the first of policy_version, calls (the oldest), `model: {policy}-v{n}`."""
    called = [call.policy_version for call in trace.calls if call.policy_version is not None]
    if trace.policy_version is not None or called:
        stated = [*called, *([] if trace.policy_version is None else [trace.policy_version])]
        return min(stated), []
    prefix, _, number = (trace.model or "").rpartition("-v")
    if prefix == policy and number.isascii() and number.isdecimal() and len(number) < 10:
        return int(number), []
    return None, [f"/model: {trace.model!r} does not name a version of {policy}"] if trace.model else []


@dataclass(frozen=True, slots=True)
class _Texts:
    """What is kept of a document while it waits for the writer: bytes, not the tenfold parsed objects."""

    normalised: bytes
    features: bytes
    feature_text: str
    opening: list[bytes]
    """The messages of the prompt, and the first action where there is one."""
    prompt_ends: list[int]
    """Indexes of the prompt's assistant messages."""
    trace_id: str
    task_id: str | None


def _texts(document: dict[str, Any], normalised: bytes | None) -> _Texts:
    messages, start = document["messages"], first_action(document)
    features = task_features(messages[:start], document.get("tools", []), document.get("context", {}))
    return _Texts(
        normalised=jsontext.dump(document) if normalised is None else normalised,
        features=jsontext.dump(
            {"text": features.text, "prompt_length": features.prompt_length, "context": features.context}
        ),
        feature_text=features.text,
        opening=[jsontext.dump(message) for message in messages[: start + 1]],
        prompt_ends=[at for at, message in enumerate(messages[:start]) if message["role"] == "assistant"],
        trace_id=document["trace_id"],
        task_id=document.get("task_id"),
    )


def _fingerprint(key: bytes, said: bytes, canonicaliser: int) -> bytes:
    """Fingerprint a canonical document; an older canonicaliser reads the newest one's as a trace."""
    if canonicaliser != native.CANONICALISER:
        trace = native.validate(Trace, jsontext.load_trusted(said))
        said = jsontext.dump(native.normalise(trace, canonicaliser))
    return hmac.digest(key, said, "sha256")


def _columns(key: bytes, said: bytes, raw: bytes, texts: _Texts) -> Columns:
    """Hash what was said, before masking; compress what is kept, after it."""
    task_id = texts.task_id
    return Columns(
        fingerprint=hmac.digest(key, said, "sha256"),
        task_key=f"id:{task_id}" if task_id else f"features:{_digest(texts.features).hex()}",
        raw=_compress(raw),
        normalised=_compress(texts.normalised),
        features=_compress(texts.features),
        text_digest=_digest(texts.feature_text.encode()),
        content_digest=_content_digest(texts),
        opening_digest=_digest(_array(texts.opening)),
        prompt_digests=_prompt_digests(texts),
    )


def _content_digest(texts: _Texts) -> bytes:
    """Digest all of a document but its id: equal only for one attempt delivered under another id.

    The messages alone will not do: two attempts at one task often say the same few words, and whether
    they do depends on their responses, which no baseline may see (tests/service/test_baseline_blindness.py).
    """
    return _digest(texts.normalised.replace(b'"trace_id":"%s"' % texts.trace_id.encode(), b""))


def _prompt_digests(texts: _Texts) -> bytes:
    """Digest, one after the other, every conversation that the prompt contains.

    Those are its prefixes that end with an assistant turn; hashed as they grow, so that a prompt of
    thousands of turns costs no more than its length.
    """
    digests, growing, at = [], hashlib.sha256(b"["), 0
    for end in texts.prompt_ends:
        for message in texts.opening[at : end + 1]:
            growing.update(b"," + message if at else message)
            at += 1
        whole = growing.copy()
        whole.update(b"]")
        digests.append(whole.digest())
    return b"".join(digests)


def _array(parts: list[bytes]) -> bytes:
    return b"[" + b",".join(parts) + b"]"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _compress(data: bytes) -> bytes:
    # A compressor belongs to one thread; making one costs four times what it compresses here.
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL)
    return compressor.compress(data)
