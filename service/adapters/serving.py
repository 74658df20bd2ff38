"""serve-sync: one server process brought to serve the version that is wanted, and no longer what is not.

    list ──> unload what has drained ──> load, if a slot is free ──> list again ──> probe ──> ready

Knows no HTTP (replicas.py). Invariants: each version has a name of its own for good, so no cache can
mix two; what is loaded is read from the server each time, never remembered, so a restart is noticed; a
load never makes the server evict an adapter that may still answer requests; "200" proves nothing, only
logprobs do.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from service.adapters.replicas import Replica, ReplicaError

TOLERANCE = 0.15
"""Greatest mean difference of a probe logprob: servers cast the adapter to the base's 16-bit floats."""
DISTINCT = 2e-3
"""Mean difference between base and adapter below which 16-bit floats cannot tell them apart."""
RETRY_SECONDS = 60.0
"""Time before a version that failed its probe is loaded again."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The version to serve, and what its logprobs must be."""

    version: int
    name: str
    path: str
    """Of its folder, as the server sees it."""
    probe_text: str
    probe_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class State:
    """How one server stands. Example: ready False, problem "no free slot: …"."""

    url: str
    ready: bool
    loaded: tuple[str, ...]
    problem: str = ""
    warning: str = ""
    """What a person should do about a server that works for now."""


def wanted(policy: str, manifest: Mapping[str, Any], folder: str) -> Wanted:
    """Return what a manifest wants served; the name is `{policy}-v{n}`, for good."""
    name = f"{policy}-v{manifest['version']}"
    probe = manifest["probe"]
    return Wanted(
        int(manifest["version"]), name, str(PurePosixPath(folder)), probe["text"], probe["logprobs"]
    )


@dataclass(slots=True)
class Synchroniser:
    """Keeps one replica at the wanted version; call `reconcile` again and again."""

    replica: Replica
    policy: str
    slots: int = 2
    """Adapters that fit at once (vLLM: `--max-loras`)."""
    drain_seconds: float = 300.0
    """Time that a version stays loaded after nobody is told to use it: requests are under way."""
    tolerance: float = TOLERANCE
    clock: Callable[[], float] = time.monotonic
    _unwanted_since: dict[str, float] = field(default_factory=dict)
    _probed: set[str] = field(default_factory=set)
    _failed_at: dict[str, float] = field(default_factory=dict)
    _warning: str = ""

    def reconcile(self, target: Wanted | None, in_use: str | None = None) -> State:
        """Do what can be done now. None: the base model serves, every version drains.

        `in_use`: the name that callers are told to use; it stays until they are told another one.
        """
        try:
            loaded = self._drained({target.name if target is not None else None, in_use})
            problem = self._serve(target, loaded) if target is not None else ""
            listed = self.replica.loaded()
        except ReplicaError as error:
            return State(self.replica.url, False, (), str(error))
        ready = not problem and (target is None or target.name in self._probed)
        return State(self.replica.url, ready, tuple(sorted(self._mine(listed))), problem, self._warning)

    def _drained(self, needed: set[str | None]) -> Mapping[str, str]:
        """Unload what has been unwanted long enough; return what the server lists then."""
        loaded, now = self.replica.loaded(), self.clock()
        self._probed &= loaded.keys()  # a restart forgets
        if not loaded:
            self._warning = ""
        unwanted = self._mine(loaded) - needed
        self._unwanted_since = {name: self._unwanted_since.get(name, now) for name in unwanted}
        due = [name for name, since in self._unwanted_since.items() if now - since >= self.drain_seconds]
        for name in due:
            self.replica.unload(name)
        return self.replica.loaded() if due else loaded

    def _serve(self, target: Wanted, loaded: Mapping[str, str]) -> str:
        """Load and probe the target; return what stands in the way."""
        if target.name not in loaded:
            if self.clock() - self._failed_at.get(target.name, -math.inf) < RETRY_SECONDS:
                return f"{target.name} failed its probe a moment ago"
            if len(loaded) >= self.slots:
                return f"no free slot: {', '.join(sorted(loaded))} are loaded and drain first"
            self.replica.load(target.name, target.path)
            before, loaded = loaded, self.replica.loaded()
            self._note_dropped(target.name, before.keys() - loaded.keys())
        if target.name not in loaded:
            return f"the server took {target.name} and does not list it"
        if loaded[target.name] != target.path:
            return f"the server has {loaded[target.name]} under the name {target.name}: a name is used once"
        if target.name not in self._probed:
            return self._probe(target)
        return ""

    def _note_dropped(self, name: str, dropped: set[str]) -> None:
        """A server that makes room though slots were free has not freed those of unloaded adapters."""
        if dropped:
            names = ", ".join(sorted(dropped))
            self._warning = f"loading {name} made the server drop {names}: unload frees no slot, restart it"

    def _probe(self, target: Wanted) -> str:
        found = self.replica.logprobs(target.name, target.probe_text)
        base = self.replica.logprobs(None, target.probe_text)
        problem = judge(found, base, target.probe_logprobs, self.tolerance)
        if not problem:
            self._probed.add(target.name)
            return ""
        self._failed_at[target.name] = self.clock()
        self.replica.unload(target.name)  # nobody was told of it: nothing is under way
        return f"{target.name}: {problem}"

    def _mine(self, loaded: Mapping[str, str]) -> set[str]:
        return {name for name in loaded if re.fullmatch(re.escape(self.policy) + r"-v\d+", name)}


def judge(
    found: Sequence[float], base: Sequence[float], expected: Sequence[float], tolerance: float = TOLERANCE
) -> str:
    """Say why these are not the logprobs of the version, or nothing.

    `found` and `base` are the server's, under the version and under the base; `expected` the trainer's.
    """
    if not len(found) == len(base) == len(expected):
        return f"the server has {len(found)} tokens, the trainer {len(expected)}: another tokenizer"
    distance = _distance(found, expected)
    if not distance <= tolerance:  # refuses NaN too
        return f"logprobs are off by {distance:.3g} on average: other weights or another base model"
    if list(found) == list(base) and _distance(base, expected) > DISTINCT:
        return "the server answers with the base model: the adapter changes nothing"
    return ""


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / max(len(a), 1)
