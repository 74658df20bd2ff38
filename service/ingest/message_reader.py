"""From Kafka messages to what the writer takes, or to the reason why not.

Knows no client and no database. Invariants: whatever is wrong with a message concerns this message
alone; what a refused message keeps has passed the policy's masks; an outage (Unavailable) is nobody's
fault and refuses nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from service import telemetry
from service.errors import FieldError, Forbidden, Gone, Invalid, NotFound, TooLarge, Unavailable, YoroError
from service.ingest.formats import jsontext
from service.ingest.intake import GRADE_LEFT_OUT, Destination, Intake, Kind
from service.ingest.masking import Mask
from service.ingest.messages import Message, Topic
from service.ingest.rollouts import NewRollout
from service.ingest.usage import Usage, check_quota
from service.ingest.writer import Item, Outcome
from service.schemas import GradeAccepted, TraceAccepted

SCHEMA_HEADER = "yoro-schema"
SCHEMAS = (b"1",)
"""Versions of the documents that are understood; a message without the header is of the first."""
Kept = Literal["whole", "masked", "hash"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message was not taken, and what is kept of it."""

    message: Message
    code: str
    detail: str
    kept: Kept
    value: bytes | None
    policy_id: int | None = None
    trace_id: str | None = None


class Entry(Protocol):
    """A policy as the directory knows it."""

    @property
    def destination(self) -> Destination:
        """What intake needs of it."""
        ...


class Policies(Protocol):
    """Where policies are looked up (service/api/directory.py)."""

    def known_policy(self, name: str) -> Entry | None:
        """Return a policy from memory. Raises Unavailable when memory is too old."""
        ...

    def policies(self) -> Sequence[Entry]:
        """Return all of them."""
        ...

    def refresh(self) -> None:
        """Read again now. Raises Unavailable."""
        ...

    def used_today(self, policy_id: int) -> Usage:
        """Return what a policy with quotas took in today."""
        ...


@dataclass(slots=True)
class _TopicSender:
    """Whoever may write to a topic, as intake sees it."""

    topic: Topic
    reserved: frozenset[str]
    """Policies that have topics of their own."""
    policies: Policies
    looked: set[str]
    """Names that were looked for in the database while this batch is read."""

    @property
    def may_grade(self) -> bool:
        """Tell whether embedded rewards are taken from this topic."""
        return self.topic.takes_grades

    @property
    def refuses_grades(self) -> bool:
        """Take the trace all the same: nobody would hear of a refusal."""
        return False

    def destination(self, policy: str | None, kind: Kind) -> Destination:
        """Return the policy named, or the topic's only one. Raises what forbids it, RateLimited among it."""
        name = self._permitted(policy)
        found = self.known(name)
        if found is None:
            raise NotFound(f"There is no policy {name!r}", code="policy_not_found")
        quotas = found.settings.quotas
        if quotas.traces_per_day is not None or quotas.grades_per_day is not None:
            check_quota(found.name, quotas, self.policies.used_today(found.id), kind)
        return found

    def known(self, name: str) -> Destination | None:
        """Return a policy; one that memory does not know is looked for once a batch."""
        entry = self.policies.known_policy(name)
        if entry is None and not self.looked:
            self.looked.add(name)
            self.policies.refresh()
            entry = self.policies.known_policy(name)
        return None if entry is None else entry.destination

    @property
    def only(self) -> str | None:
        """Return the policy that a document need not name."""
        policies = self.topic.policies
        return next(iter(policies)) if policies is not None and len(policies) == 1 else None

    def brings(self, name: str) -> bool:
        """Tell whether a policy's documents come through this topic."""
        policies = self.topic.policies
        return name not in self.reserved if policies is None else name in policies

    def _permitted(self, name: str | None) -> str:
        if name is None:
            name = self.only
        if name is None:
            raise Invalid("", [FieldError("/policy", f"needed: {self.topic.name} is no one policy's")])
        if not self.brings(name):
            raise Forbidden(f"Policy {name!r} does not come through {self.topic.name}", code="policy")
        return name


@dataclass(slots=True)
class Reader:
    """Makes items of messages; keeps what cannot be taken."""

    intake: Intake
    policies: Policies
    topics: Mapping[str, Topic]
    _reserved: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Note which policies have topics of their own."""
        self._reserved = frozenset(name for topic in self.topics.values() for name in topic.policies or ())

    def read(self, messages: Iterable[Message]) -> list[Item | Refusal]:
        """Prepare every message. Raises Unavailable: the same messages may be read again later."""
        looked: set[str] = set()
        return [self._read(message, looked) for message in messages]

    def became(
        self, messages: Sequence[Message], prepared: Sequence[Item | Refusal], outcomes: Sequence[Outcome]
    ) -> list[TraceAccepted | GradeAccepted | Refusal]:
        """Return what became of every message, in order; what the writer refused is a refusal too."""
        written = iter(outcomes)
        found: list[TraceAccepted | GradeAccepted | Refusal] = []
        for message, item in zip(messages, prepared, strict=True):
            outcome = item if isinstance(item, Refusal) else next(written)
            found.append(self._refuse(message, outcome) if isinstance(outcome, YoroError) else outcome)
        return found

    def _refuse(self, message: Message, error: YoroError) -> Refusal:
        """Say why a message is not taken, keeping of it what may be kept. Raises Unavailable."""
        document = None
        if message.value is not None and not isinstance(error, TooLarge):
            try:
                document = jsontext.parse(message.value, max_depth=self.intake.limits.json_depth)
            except YoroError:
                document = None
        return self._refusal(message, document, error, self._sender(message, set()))

    def _read(self, message: Message, looked: set[str]) -> Item | Refusal:
        sender, document = self._sender(message, looked), None
        try:
            value = self._value(message)
            document = jsontext.parse(value, max_depth=self.intake.limits.json_depth)
            return self._item(sender, document, value)
        except Unavailable:
            raise
        except YoroError as error:
            return self._refusal(message, document, error, sender)
        except Exception as error:  # a defect of ours must not hold up the partition for ever
            telemetry.logger().error("message_not_read", offset=message.offset, exc_info=error)
            return self._refusal(
                message, document, YoroError(f"{type(error).__name__} while reading"), sender
            )

    def _value(self, message: Message) -> bytes:
        """Return the document's bytes. Raises what forbids parsing them."""
        schemas = {value for name, value in message.headers if name == SCHEMA_HEADER}
        if not schemas <= {*SCHEMAS}:
            raise Invalid(f"Header {SCHEMA_HEADER} is none of 1", code="schema_version")
        if message.value is None:
            raise Invalid("A tombstone: the message has no value", code="tombstone")
        limits, kind = self.intake.limits, self.topics[message.partition.topic].kind
        limit = limits.trace_bytes if kind == "traces" else limits.grade_bytes
        if len(message.value) > limit:
            code = "trace_bytes" if kind == "traces" else "grade_bytes"
            raise TooLarge(f"The message has {len(message.value)} bytes, the limit is {limit}", code=code)
        return message.value

    def _item(self, sender: _TopicSender, document: Any, value: bytes) -> Item:
        if sender.topic.kind == "grades":
            return self.intake.grade(document, value, sender)
        item: NewRollout = self.intake.trace(document, value, sender)
        if GRADE_LEFT_OUT in item.warnings:
            telemetry.CONSUMED_GRADES_LEFT_OUT.labels(sender.topic.name).inc()
        return item

    def _sender(self, message: Message, looked: set[str]) -> _TopicSender:
        topic = self.topics[message.partition.topic]
        return _TopicSender(topic, self._reserved, self.policies, looked)

    def _refusal(self, message: Message, document: Any, error: YoroError, sender: _TopicSender) -> Refusal:
        topic, named = sender.topic, document if isinstance(document, dict) else {}
        name = named.get("policy", sender.only)
        policy = sender.known(name) if isinstance(name, str) else None
        mask = None if policy is None else policy.mask
        if isinstance(error, Gone):
            kept, value = _HASH  # what was erased does not come back by this way either
        elif document is not None and isinstance(name, str):
            kept, value = _masked(message, document, mask)
        else:
            kept, value = _HASH if self._is_any_masked(topic) else ("whole", message.value)
        owned = policy is not None and kept != "hash" and sender.brings(policy.name)
        trace_id = named.get("trace_id") if owned else None
        return Refusal(
            message, error.code, _detail(error, kept, mask), kept, value,
            policy.id if policy is not None and sender.brings(policy.name) else None,
            _plain(trace_id)[:200] if isinstance(trace_id, str) else None,
        )  # fmt: skip

    def _is_any_masked(self, topic: Topic) -> bool:
        """Tell whether a message of nobody knows which policy may hold what a policy masks."""
        return any(
            entry.destination.mask is not None
            for entry in self.policies.policies()
            if topic.policies is None or entry.destination.name in topic.policies
        )


_HASH: tuple[Kept, None] = ("hash", None)


def _masked(message: Message, document: Any, mask: Mask | None) -> tuple[Kept, bytes | None]:
    """Return what a policy with this mask lets be kept of a message."""
    if mask is None:
        return "whole", message.value
    try:
        masked = mask.value(document)
    except Invalid:
        return _HASH
    return ("whole", message.value) if masked == document else ("masked", jsontext.as_sent(masked))


def _detail(error: YoroError, kept: Kept, mask: Mask | None) -> str:
    """Return the reason in words, without what the message does not keep: it may quote keys and values."""
    if kept == "hash":
        return error.title
    found = "; ".join(f"{defect.pointer}: {defect.message}" for defect in error.errors[:5])
    detail = _plain(found or error.detail)
    try:
        return detail if mask is None else mask.text(detail)
    except Invalid:  # the policy's function takes the document, but not our words about it
        return error.title


def _plain(text: str) -> str:
    """Return text that Postgres can hold and a header can carry."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")[:2000]
