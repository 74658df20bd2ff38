"""Rows of `dead_letters`: messages that could not be taken, and their way out.

Must run inside the caller's transaction. Knows no client. Invariants: one row a message, however
often it is delivered; a row is never changed but for its way through the outbox, a replay, and erasure;
what goes to the dead-letter topic is what the row keeps.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from sqlalchemy import Connection, text

from service.ingest import arrays
from service.ingest.message_reader import Refusal
from service.ingest.messages import Message, Partition, Topic

REASON, DETAIL, TOPIC, PARTITION, OFFSET, TIME, KEPT, DIGEST = (
    "yoro-reason", "yoro-detail", "yoro-topic", "yoro-partition", "yoro-offset", "yoro-time", "yoro-kept",
    "yoro-sha256",
)  # fmt: skip
"""Headers that a dead letter has beside its own."""

_ADD = text("""
INSERT INTO dead_letters (topic, partition, message_offset, digest, policy_id, trace_id, code, detail, kept,
                          message_key, value, headers, size, produced_at)
SELECT topic, partition, message_offset, digest, policy_id, trace_id, code, detail, kept,
       message_key, value, CAST(headers AS jsonb), size, produced_at
FROM unnest(CAST(:topic AS text[]), CAST(:partition AS integer[]), CAST(:message_offset AS bigint[]),
    CAST(:digest AS bytea[]), CAST(:policy_id AS bigint[]), CAST(:trace_id AS text[]), CAST(:code AS text[]),
    CAST(:detail AS text[]), CAST(:kept AS text[]), CAST(:message_key AS bytea[]), CAST(:value AS bytea[]),
    CAST(:headers AS text[]), CAST(:size AS bigint[]), CAST(:produced_at AS timestamptz[]))
    AS new (topic, partition, message_offset, digest, policy_id, trace_id, code, detail, kept,
            message_key, value, headers, size, produced_at)
ORDER BY topic, partition, message_offset
ON CONFLICT (topic, partition, message_offset, digest) DO NOTHING
RETURNING topic, code
""")

_CLAIM = text("""
WITH due AS (
    SELECT id FROM dead_letters WHERE due_at <= clock_timestamp()
    ORDER BY due_at LIMIT :limit FOR UPDATE SKIP LOCKED
)
UPDATE dead_letters d SET attempts = d.attempts + 1,
    due_at = clock_timestamp() + make_interval(secs => least(300, 5 * power(2, least(d.attempts, 10))))
FROM due WHERE d.id = due.id
RETURNING d.id, d.topic, d.partition, d.message_offset, d.code, d.detail, d.message_key, d.value, d.headers,
          d.created_at, d.kept, d.digest
""")

_RELAYED = text("UPDATE dead_letters SET due_at = NULL, last_error = '' WHERE id = ANY(:ids)")
_NOT_RELAYED = text("UPDATE dead_letters SET last_error = :error WHERE id = :id")

_FORGET = text("""
DELETE FROM dead_letters WHERE id IN (
    SELECT id FROM dead_letters WHERE created_at < clock_timestamp() - make_interval(secs => :seconds)
    ORDER BY created_at LIMIT :limit)
""")

_COLUMNS = """id, topic, partition, message_offset, policy_id, trace_id, code, detail, kept, size, headers,
       produced_at, created_at, attempts, due_at, last_error, replayed_at"""

_LIST = text(f"""
SELECT {_COLUMNS} FROM dead_letters
WHERE (CAST(:before AS bigint) IS NULL OR id < :before) AND (CAST(:code AS text) IS NULL OR code = :code)
  AND (NOT :open OR replayed_at IS NULL)
ORDER BY id DESC LIMIT :limit
""")  # noqa: S608 - columns are ours

_SHOW = text(f"SELECT {_COLUMNS}, message_key, value FROM dead_letters WHERE id = :id")  # noqa: S608

_REPLAYABLE = text("""
SELECT id, topic, partition, message_offset, message_key, value, headers, produced_at
FROM dead_letters
WHERE replayed_at IS NULL AND kept = 'whole' AND value IS NOT NULL AND id > :after
  AND (CAST(:ids AS bigint[]) IS NULL OR id = ANY(:ids)) AND (CAST(:code AS text) IS NULL OR code = :code)
ORDER BY id LIMIT :limit
""")

_REPLAYED = text("UPDATE dead_letters SET replayed_at = clock_timestamp() WHERE id = ANY(:ids)")
_STILL_REFUSED = text("UPDATE dead_letters SET code = :code, detail = :detail WHERE id = :id")


def add(connection: Connection, refusals: Sequence[Refusal]) -> list[tuple[str, str]]:
    """Store what was refused; return topic and code of what was not there yet."""
    if not refusals:
        return []
    return [(row.topic, row.code) for row in connection.execute(_ADD, _encoded(refusals))]


def claim(connection: Connection, limit: int) -> list[Any]:
    """Take due letters in hand: their next try is moved ahead, so that nothing is locked meanwhile."""
    return list(connection.execute(_CLAIM, {"limit": limit}))


def settle(connection: Connection, outcomes: Iterable[tuple[int, str]]) -> None:
    """Note which letters are on the dead-letter topic, and why the others are not."""
    relayed = []
    for id_, error in outcomes:
        if error:
            connection.execute(_NOT_RELAYED, {"id": id_, "error": error[:500]})
        else:
            relayed.append(id_)
    connection.execute(_RELAYED, {"ids": relayed})


def forget(connection: Connection, older_than_seconds: float, limit: int) -> int:
    """Remove letters beyond their time, a bounded number at once; return how many."""
    done = connection.execute(_FORGET, {"seconds": older_than_seconds, "limit": limit})
    return int(done.rowcount)


def listed(
    connection: Connection, *, before: int | None, code: str | None, is_open: bool, limit: int
) -> list[Any]:
    """Return letters without their content, newest first."""
    asked = {"before": before, "code": code, "open": is_open, "limit": limit}
    return list(connection.execute(_LIST, asked))


def found(connection: Connection, id_: int) -> Any | None:
    """Return one letter with its content."""
    return connection.execute(_SHOW, {"id": id_}).one_or_none()


def replayable(
    connection: Connection, *, ids: Sequence[int] | None, code: str | None, after: int, limit: int
) -> list[tuple[int, Message]]:
    """Return letters that are kept whole and were not replayed yet, as they came."""
    asked = {"ids": None if ids is None else list(ids), "code": code, "after": after, "limit": limit}
    return [(row.id, _message(row)) for row in connection.execute(_REPLAYABLE, asked)]


def mark_replayed(connection: Connection, ids: Sequence[int], refused: Sequence[tuple[int, Refusal]]) -> None:
    """Note which letters were taken now, and why the others were not."""
    connection.execute(_REPLAYED, {"ids": list(ids)})
    for id_, refusal in refused:
        connection.execute(_STILL_REFUSED, {"id": id_, "code": refusal.code, "detail": refusal.detail})


def as_message(row: Any, topic: Topic | None, default: str) -> Message:
    """Return a claimed letter as it goes to the dead-letter topic."""
    headers = (
        *_headers(row.headers), (REASON, row.code.encode()), (DETAIL, row.detail.encode()),
        (TOPIC, row.topic.encode()), (PARTITION, b"%d" % row.partition), (OFFSET, b"%d" % row.message_offset),
        (TIME, row.created_at.isoformat().encode()), (KEPT, row.kept.encode()),
        (DIGEST, row.digest.hex().encode()),
    )  # fmt: skip
    name = default if topic is None else topic.dead_letters
    return Message(Partition(name, -1), 0, row.message_key, row.value, headers)


def _message(row: Any) -> Message:
    return Message(
        Partition(row.topic, row.partition), row.message_offset, row.message_key, row.value,
        _headers(row.headers), row.produced_at,
    )  # fmt: skip


def _headers(stored: list[Any]) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((name, None if value is None else base64.b64decode(value)) for name, value in stored)


def _encoded(refusals: Sequence[Refusal]) -> dict[str, arrays.Array]:
    messages = [refusal.message for refusal in refusals]
    whole = [refusal.kept != "hash" for refusal in refusals]
    return {
        "topic": arrays.texts(message.partition.topic for message in messages),
        "partition": arrays.integers(message.partition.number for message in messages),
        "message_offset": arrays.bigints(message.offset for message in messages),
        "digest": arrays.byteas(hashlib.sha256(message.value or b"").digest() for message in messages),
        "policy_id": arrays.bigints(refusal.policy_id for refusal in refusals),
        "trace_id": arrays.texts(refusal.trace_id for refusal in refusals),
        "code": arrays.texts(refusal.code for refusal in refusals),
        "detail": arrays.texts(refusal.detail for refusal in refusals),
        "kept": arrays.texts(refusal.kept for refusal in refusals),
        "message_key": arrays.byteas(
            message.key if keep else None for message, keep in zip(messages, whole, strict=True)
        ),
        "value": arrays.byteas(refusal.value for refusal in refusals),
        "headers": arrays.texts(
            _stored_headers(message) if keep else "[]" for message, keep in zip(messages, whole, strict=True)
        ),
        "size": arrays.bigints(None if message.value is None else len(message.value) for message in messages),
        "produced_at": arrays.moments(message.produced_at for message in messages),
    }


def _stored_headers(message: Message) -> str:
    encoded = [
        [name.replace("\x00", ""), None if value is None else base64.b64encode(value).decode()]
        for name, value in message.headers
    ]
    return orjson.dumps(encoded).decode()
