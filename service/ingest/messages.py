"""Kafka messages, their coordinates, and the topics that they come through.

Knows no client and nothing of what messages say.
"""

from dataclasses import dataclass
from datetime import datetime

from service.errors import Invalid
from service.ingest.intake import Kind
from service.settings import KafkaSettings


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of a topic."""

    topic: str
    number: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message as it came. `value` None is a tombstone."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    produced_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a partition was read: `position` is the next offset to read, `end` the next to be written."""

    position: int
    end: int | None


@dataclass(frozen=True, slots=True)
class Topic:
    """What may come through a topic."""

    name: str
    kind: Kind
    dead_letters: str
    policies: frozenset[str] | None
    """Policies that come through it and no other topic of its kind; None: all that have no such topic."""
    takes_grades: bool
    """Whether embedded rewards are taken."""


def all_topics(settings: KafkaSettings) -> list[str]:
    """Return the names of all topics of an installation, dead letters too."""
    found = topics_of(settings)
    return sorted({*found, *(topic.dead_letters for topic in found.values())})


def topics_of(settings: KafkaSettings) -> dict[str, Topic]:
    """Return every topic that is consumed, by name. Raises Invalid where two have one name."""
    found: dict[str, Topic] = {}
    for prefix, policies in {"": None, **settings.prefixes}.items():
        names: tuple[tuple[Kind, str], ...] = (
            ("traces", prefix + settings.traces_topic), ("grades", prefix + settings.rewards_topic),
        )  # fmt: skip
        for kind, name in names:
            if name in found:
                raise Invalid(
                    f"Two topics are named {name!r}: see YORO_KAFKA_…_TOPIC and YORO_KAFKA_PREFIXES"
                )
            found[name] = Topic(
                name, kind, prefix + settings.dead_letter_topic,
                None if policies is None else frozenset(policies), name in settings.graded_topics,
            )  # fmt: skip
    return found
