"""Who may send how much now: a token bucket a key, and bytes in flight.

Each process keeps buckets of its own. Knows no HTTP.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from service.errors import RateLimited, Unavailable

BURST_SECONDS = 2.0
"""How many seconds of its rate a key that was silent may send at once."""


@dataclass(slots=True)
class Bucket:
    """Tokens of one key: one a document. It may go into debt, so that a batch is never cut in two."""

    rate: float
    clock: Callable[[], float] = time.monotonic
    tokens: float = field(init=False)
    filled_at: float = field(init=False)

    def __post_init__(self) -> None:
        """Start full."""
        self.tokens, self.filled_at = self._most, self.clock()

    def take(self) -> bool:
        """Take one token if there is one."""
        self._fill()
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def admit(self) -> None:
        """Let a request in unless the key is in debt. Raises RateLimited with the time to wait."""
        self._fill()
        if self.tokens < 1:
            wait = math.ceil((1 - self.tokens) / self.rate)
            raise RateLimited(
                f"This key may send {self.rate:g} documents a second",
                code="key_rate", retry_after_seconds=max(1, wait),
            )  # fmt: skip

    def charge(self, documents: int) -> None:
        """Take the tokens of the documents that a request turned out to hold."""
        self.tokens -= documents

    def _fill(self) -> None:
        now = self.clock()
        self.tokens = min(self._most, self.tokens + (now - self.filled_at) * self.rate)
        self.filled_at = now

    @property
    def _most(self) -> float:
        return max(1.0, self.rate * BURST_SECONDS)


@dataclass(slots=True)
class InFlight:
    """Bytes of bodies that requests hold before the writer's queue counts them: memory stays flat."""

    limit: int
    held: int = 0

    @contextmanager
    def holding(self) -> Iterator["Held"]:
        """Count what one request reads, until it is prepared."""
        held = Held(self)
        try:
            yield held
        finally:
            self.held -= held.bytes


@dataclass(slots=True)
class Held:
    """One request's share of the bytes in flight."""

    of: InFlight
    bytes: int = 0

    def add(self, count: int) -> None:
        """Take more. Raises Unavailable where all requests together hold too much."""
        if self.of.held + count > self.of.limit and self.of.held > self.bytes:
            raise Unavailable("Intake holds as many bytes as it may", code="overloaded")
        self.of.held += count
        self.bytes += count
