"""A grader as production has them: it answers seconds later, and out of order.

Knows answers and tasks, never the model. Some grades arrive before their trace does.
"""

import heapq
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from yoro.demo import tasks
from yoro.demo.sending import Sender
from yoro.demo.tasks import DemoTask

LONGEST_DELAY_SECONDS = 4.0
RECENT = 64
"""Rewards that the screen's mean is taken over."""


@dataclass(order=True, slots=True)
class _Due:
    """A grade and the time when it is posted."""

    at: float
    trace_id: str = field(compare=False)
    value: float = field(compare=False)


class LateGrader:
    """Posts each grade at a random moment within the next seconds, from a thread."""

    def __init__(self, client: Sender, policy: str, seed: int) -> None:
        """Start on entering the block; leaving it posts what is still due."""
        self._client, self._policy = client, policy
        self._delays = random.Random(seed)  # noqa: S311 - a delay, not a secret
        self._due: list[_Due] = []
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._changed = threading.Condition()
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._post_all, name="grader", daemon=True)

    def __enter__(self) -> Self:
        """Start grading."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Post what is still due, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def expect(self, trace_id: str, task: DemoTask, answer: str) -> None:
        """Grade an answer; the grade is posted later. Raises what an earlier post raised."""
        if self._failure is not None:
            raise self._failure
        due = _Due(
            time.monotonic() + self._delays.uniform(0, LONGEST_DELAY_SECONDS),
            trace_id,
            tasks.grade(task, answer),
        )
        with self._changed:
            heapq.heappush(self._due, due)
            self._recent.append(due.value)
            self._changed.notify()

    def mean_reward(self) -> float | None:
        """Return the mean of the newest rewards."""
        with self._changed:
            return sum(self._recent) / len(self._recent) if self._recent else None

    def _post_all(self) -> None:
        while (due := self._next()) is not None:
            grade = {
                "policy": self._policy, "trace_id": due.trace_id, "grader": "demo", "value": due.value,
            }  # fmt: skip
            try:
                self._client.post_reward(grade)
            except Exception as error:
                self._failure = error
                return

    def _next(self) -> _Due | None:
        """Wait for the next due grade; None when closing and nothing is left."""
        with self._changed:
            while True:
                if not self._due and self._closing:
                    return None
                wait = self._due[0].at - time.monotonic() if self._due else None
                if wait is not None and (wait <= 0 or self._closing):
                    return heapq.heappop(self._due)
                self._changed.wait(wait)
