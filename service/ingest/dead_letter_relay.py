"""The outbox of the dead letters: from the table to the dead-letter topic, from any number of consumers.

A letter is claimed by moving its next try ahead; a relay that dies in between is made up for by that
next try: at least once. A topic that does not take letters holds up nothing but its letters.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sqlalchemy import Engine

from service import telemetry
from service.database.engine import transaction
from service.errors import Unavailable
from service.ingest import dead_letters
from service.ingest.messages import Message, Topic

INTERVAL_SECONDS = 1.0
FORGET_SECONDS = 60.0
CLAIMED = 8
"""Letters sent at once; each may be as large as a message."""
FORGOTTEN = 1000
"""Letters removed at once."""


class Sending(Protocol):
    """Who sends messages (service/ingest/kafka.py)."""

    def send(self, messages: Sequence[Message]) -> list[str]:
        """Send messages; say what went wrong with each."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class LetterRelay:
    """Sends on what is due until told to stop."""

    def __init__(
        self, engine: Engine, connect: Callable[[], Sending], topics: Mapping[str, Topic], *, default: str,
        keep_days: float,
    ) -> None:  # fmt: skip
        """Take where letters are and how the broker is reached; letters of unknown topics go to `default`."""
        self._engine, self._connect, self._topics = engine, connect, topics
        self._default, self._keep_seconds = default, keep_days * 86_400
        self._sending: Sending | None = None
        self._tidied_at = -FORGET_SECONDS

    def run(self, stop: threading.Event) -> None:
        """Loop until `stop`; a database or broker that does not answer is waited for."""
        while not stop.is_set():
            try:
                busy = self.tick()
            except Unavailable as error:
                telemetry.logger().warning("dead_letters_wait", detail=error.detail)
                busy = 0
            if not busy:
                stop.wait(INTERVAL_SECONDS)
        if self._sending is not None:
            self._sending.close()

    def tick(self) -> int:
        """Send what is due; return how many letters were tried."""
        with transaction(self._engine) as connection:
            due = dead_letters.claim(connection, CLAIMED)
        if due:
            self._relay(due)
        elif time.monotonic() - self._tidied_at > FORGET_SECONDS:
            with transaction(self._engine) as connection:
                forgotten = dead_letters.forget(connection, self._keep_seconds, FORGOTTEN)
            if forgotten < FORGOTTEN:
                self._tidied_at = time.monotonic()
        return len(due)

    def _relay(self, due: Sequence[Any]) -> None:
        messages = [dead_letters.as_message(row, self._topics.get(row.topic), self._default) for row in due]
        errors = self._send(messages)
        with transaction(self._engine) as connection:
            dead_letters.settle(connection, [(row.id, error) for row, error in zip(due, errors, strict=True)])
        for error in errors:
            telemetry.DEAD_LETTERS_RELAYED.labels("failed" if error else "sent").inc()
        if any(errors):
            telemetry.logger().warning(
                "dead_letters_not_relayed", count=len(errors), error=next(filter(None, errors))
            )

    def _send(self, messages: Sequence[Message]) -> list[str]:
        try:
            if self._sending is None:
                self._sending = self._connect()
            return self._sending.send(messages)
        except Unavailable as error:
            return [error.detail] * len(messages)
