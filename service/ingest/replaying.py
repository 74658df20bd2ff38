"""Dead letters taken in again: through the same reader and writer, in one transaction with their mark.

Knows no broker: what is replayed is what the table kept. Invariant: only what was kept whole is
replayed, since a masked document is not what the agent said.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from service.ingest import dead_letters
from service.ingest.message_reader import Reader, Refusal
from service.ingest.messages import Message
from service.ingest.writer import Outcome, Writer
from service.schemas import GradeAccepted, TraceAccepted


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of one letter: accepted, duplicate, or refused, with the reason."""

    id: int
    status: str
    code: str = ""
    detail: str = ""


def replay(writer: Writer, reader: Reader, letters: Sequence[tuple[int, Message]]) -> list[Replayed]:
    """Take letters in again. Raises Unavailable: nothing is known to have changed."""
    known = [(id_, message) for id_, message in letters if message.partition.topic in reader.topics]
    prepared = reader.read(message for _, message in known)
    became: list[TraceAccepted | GradeAccepted | Refusal] = []

    def mark(connection: Connection, outcomes: list[Outcome]) -> None:
        became[:] = reader.became([message for _, message in known], prepared, outcomes)
        taken = [id_ for (id_, _), found in zip(known, became, strict=True) if not isinstance(found, Refusal)]
        refused = [
            (id_, found) for (id_, _), found in zip(known, became, strict=True) if isinstance(found, Refusal)
        ]
        dead_letters.mark_replayed(connection, taken, refused)

    writer.write([item for item in prepared if not isinstance(item, Refusal)], mark)
    foreign = [
        Replayed(
            id_, "refused", "topic_unknown", f"{message.partition.topic} is no topic of this installation"
        )
        for id_, message in letters
        if message.partition.topic not in reader.topics
    ]
    return [_replayed(id_, found) for (id_, _), found in zip(known, became, strict=True)] + foreign


def _replayed(id_: int, found: TraceAccepted | GradeAccepted | Refusal) -> Replayed:
    if isinstance(found, Refusal):
        return Replayed(id_, "refused", found.code, found.detail)
    return Replayed(id_, found.status)
