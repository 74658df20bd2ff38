"""What lifecycle.md says must become of rollouts, in plain Python and independent of the service."""

from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, float, int]
"""Order of revisions: stated times lie years back, then receive times, then arrival."""


@dataclass
class Revision:
    """One revision of a grader's grade."""

    value: float | None
    graded_at: int | None
    key: Key
    received: float
    criteria: dict[str, float] | None = None


@dataclass
class Trace:
    """What is known of one trace id."""

    received: float | None = None
    first_seen: float = 0.0
    status: str = "completed"
    task: str = ""
    revisions: dict[str, list[Revision]] = field(default_factory=dict)
    current: dict[str, Revision] = field(default_factory=dict)
    expired: bool = False


@dataclass
class Oracle:
    """Everything that was posted, and the rule in force."""

    reward: dict[str, Any]
    statuses: dict[str, str]
    now: float = 0.0
    arrivals: int = 0
    traces: dict[str, Trace] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)

    def post_trace(self, trace_id: str, status: str, task: str) -> None:
        found = self.traces.setdefault(trace_id, Trace(first_seen=self.now))
        if found.received is None:
            found.received, found.status, found.task = self.now, status, task

    def post_grade(
        self,
        trace_id: str,
        grader: str,
        value: float | None,
        graded_at: int | None,
        criteria: dict[str, float] | None,
    ) -> None:
        found = self.traces.setdefault(trace_id, Trace(first_seen=self.now))
        history = found.revisions.setdefault(grader, [])
        if any(old.value == value and (graded_at is None or graded_at == old.graded_at) for old in history):
            return
        self.arrivals += 1
        key = (0, float(graded_at), self.arrivals) if graded_at is not None else (1, self.now, self.arrivals)
        new = Revision(value, graded_at, key, self.now, criteria)
        before = found.current.get(grader)
        history.append(new)
        retracted = before is not None and before.value is None and value is not None and graded_at is None
        if before is None or (not retracted and new.key > before.key):
            found.current[grader] = new

    def settle(self, gone: set[str]) -> None:
        """Expire what is due; `gone`: traces that are in a batch or beyond."""
        ttl, grade_ttl = self.reward["expire_seconds"], self.reward["grade_expire_seconds"]
        for trace_id in list(self.traces):
            trace = self.traces[trace_id]
            if trace.received is None:
                if self.now - trace.first_seen >= grade_ttl:
                    del self.traces[trace_id]
                continue
            old = self.now - trace.received >= ttl
            if trace.expired and not old:
                trace.expired = False
            if old and trace_id not in gone and self.expected(trace_id)[0] == "waiting_reward":
                trace.expired = True

    def expected(self, trace_id: str) -> tuple[str, str, float | None]:
        """State, reason and reward of a rollout that is in no batch."""
        trace = self.traces[trace_id]
        obstacle, reward = self._judged(trace)
        if self.statuses.get(trace.status, "train") == "exclude":
            return "excluded", "failed_rollout", reward
        if trace.expired:
            return "excluded", "expired", reward
        return ("waiting_reward", obstacle, None) if obstacle else ("ready", "", reward)

    def _judged(self, trace: Trace) -> tuple[str, float | None]:
        rule = self.reward
        counting = {
            grader: revision
            for grader, revision in sorted(trace.current.items())
            if revision.value is not None and grader not in self.quarantined
        }
        if not counting:
            return "no_grade", None
        missing = [grader for grader in rule["require"] if grader not in counting]
        if missing:
            return "missing:" + ",".join(missing), None
        reward = self._reward(counting)
        if reward is None:
            return "missing:weighted", None
        if self.now - min(r.received for r in counting.values()) < rule["wait_seconds"]:
            return "waiting_for_graders", None
        if self.now - max(r.received for r in counting.values()) < rule["settle_seconds"]:
            return "settling", None
        return "", reward

    def _reward(self, counting: dict[str, Revision]) -> float | None:
        values = {grader: self._value(revision) for grader, revision in counting.items()}
        if self.reward["rule"] == "min":
            return min(values.values())
        if self.reward["rule"] == "latest":
            newest = max(counting, key=lambda grader: counting[grader].key[:2])
            return values[newest]
        weights = self.reward["weights"] if self.reward["rule"] == "weighted" else dict.fromkeys(values, 1.0)
        total = sum(weights.get(grader, 0.0) for grader in values)
        if not total:
            return None
        return sum(value * weights.get(grader, 0.0) for grader, value in values.items()) / total

    def _value(self, revision: Revision) -> float:
        assert revision.value is not None
        weights = {name: weight for name, weight in self.reward["criteria"].items() if weight}
        stated = revision.criteria or {}
        if not weights or any(name not in stated for name in weights):
            return revision.value
        return sum(weights[name] * stated[name] for name in weights) / sum(weights.values())
