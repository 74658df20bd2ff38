"""The scheduler's loop: due gates, expiry, overload, missing embeddings, assembly, a policy at a time.

Any number may run: assembly is locked a policy at a time inside one transaction, everything else is
idempotent. One dying costs the others nothing. Vectors are computed before the transaction that
uses them, so no lock is held while a model runs.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, text

from service import telemetry
from service.baselines.features import Task
from service.batches import (
    alerts,
    assembly,
    choices,
    counts,
    expiry,
    gates,
    guards,
    history,
    overload,
    turns,
    vectors,
)
from service.batches.choices import Formed
from service.batches.locks import ASSEMBLY, try_lock
from service.batches.outlook import Outlook, outlook
from service.batches.vectors import MissingText, VectorMissing
from service.database.engine import transaction
from service.errors import Unavailable

WATCH_SECONDS = 5.0
"""Time between two looks for alerts."""

_POLICIES = text("SELECT id FROM policies ORDER BY id")


class TextEncoder(Protocol):
    """What the scheduler needs of a sentence encoder (baselines/embedding.py)."""

    @property
    def name(self) -> str:
        """Name under which vectors are cached."""
        ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one unit row a text."""
        ...


class Scheduler:
    """Forms batches for every policy until told to stop."""

    def __init__(self, engine: Engine, encoder: TextEncoder, *, interval_seconds: float) -> None:
        """Take the process's engine and encoder."""
        self._engine = engine
        self._encoder = encoder
        self._interval = interval_seconds
        self._watched_at: dict[int, float] = {}
        # The last batch's tasks, a policy's at a time: the next one's history is nearly the same. What
        # was erased meanwhile is not asked for again, and goes with the next batch.
        self._known: dict[int, dict[int, Task]] = {}
        # What of each policy guards saw last: they look again when it has changed.
        self._guarded: dict[int, object] = {}
        self._log = telemetry.logger()

    def run(self, stop: threading.Event) -> None:
        """Loop until `stop`; a database that does not answer is waited for."""
        while not stop.is_set():
            try:
                formed = self.tick()
            except Unavailable as error:
                self._log.warning("database_unavailable", detail=error.detail)
                formed = 0
            if not formed:
                stop.wait(self._interval)

    def tick(self) -> int:
        """Look once at every policy; return how many batches were formed.

        One batch a policy and look: a policy with much to train cannot keep the others waiting.
        """
        with transaction(self._engine) as connection:
            gates.evaluate_due(connection)
            counts.fold(connection)
            policies = list(connection.execute(_POLICIES).scalars())
        return sum(self._serve(policy) for policy in policies)

    def _serve(self, policy_id: int) -> int:
        """Do all that is due for one policy; its defects are logged and cost the others nothing."""
        try:
            self._guard(self._tidy(policy_id))
            self._advance(policy_id)
            formed = self.form(policy_id)
            if formed is not None:
                choices.observe(self._engine, formed)
            return int(formed is not None)
        except Unavailable:
            raise
        except Exception as error:
            self._log.error("policy_not_scheduled", policy_id=policy_id, exc_info=error)
            return 0

    def _tidy(self, policy_id: int) -> Outlook:
        """Evaluate what a change outdated, expire, leave out what is too much, watch for trouble.

        Return what the policy looked like.
        """
        with transaction(self._engine) as connection:
            gates.evaluate_policy(connection, policy_id)
            view = outlook(connection, policy_id)
            expiry.expire(connection, policy_id, view.settings.reward)
            self._watch(connection, view)
        if overload.is_too_much(view.settings, view.fresh):
            with transaction(self._engine) as connection:
                if try_lock(connection, ASSEMBLY, policy_id):
                    view = outlook(connection, policy_id)
                    overload.leave_out(connection, policy_id, view.settings, view.fresh_depths, view.fresh)
        return view

    def _watch(self, connection: Connection, view: Outlook) -> None:
        """Raise and clear alerts, which need no more than a look every few seconds."""
        now = time.monotonic()
        if now - self._watched_at.get(view.policy_id, -WATCH_SECONDS) >= WATCH_SECONDS:
            self._watched_at[view.policy_id] = now
            alerts.keep(connection, view, alerts.find(connection, view))

    def _guard(self, view: Outlook) -> None:
        """Let guards stop or slow down what goes wrong; they look again once something has changed."""
        state = (view.next_batch, view.head_version, view.ready_batches, view.revision, view.paused)
        telemetry.PAUSED.labels(view.policy).set(view.paused)
        if view.paused or self._guarded.get(view.policy_id) == state:
            return
        with transaction(self._engine) as connection:
            needed = guards.needed_rollouts(connection, view)
            missing = history.missing_texts(connection, needed, self._encoder.name) if needed else {}
        self._embed(missing)
        try:
            with transaction(self._engine) as connection:
                act = guards.act(connection, view, self._encoder.name)
        except VectorMissing:
            return  # rollouts came into view meanwhile; the next look embeds them
        self._guarded[view.policy_id] = state
        if act is not None:
            telemetry.GUARD_ACTS.labels(view.policy, act.guard, act.deed).inc()
            self._log.warning("guard_acted", policy=view.policy, **asdict(act))

    def _advance(self, policy_id: int) -> None:
        """Let the choice of baselines learn from batches that ended."""
        with transaction(self._engine) as connection:
            found = choices.ended(connection, policy_id)
            to_fit = [] if found is None else found.to_fit
            missing = history.missing_texts(connection, to_fit, self._encoder.name) if to_fit else {}
        if found is None:
            return
        self._embed(missing)
        try:
            with transaction(self._engine) as connection:
                seen = history.load(connection, to_fit, self._encoder.name, self._known.get(policy_id, {}))
        except VectorMissing:
            return  # an erasure took one meanwhile; the next look embeds it
        choices.advance(self._engine, policy_id, found, seen)

    def form(self, policy_id: int) -> Formed | None:
        """Form the policy's next batch if one is due; what it needs is embedded first."""
        known = self._known.get(policy_id, {})
        with transaction(self._engine) as connection:
            view = outlook(connection, policy_id)
            needed = [] if view.blocked_by else assembly.needed_rollouts(connection, view)
            new = [rollout for rollout in needed if rollout not in known]
            missing = history.missing_texts(connection, new, self._encoder.name) if new else {}
            with_turns = view.candidates if needed and view.settings.objective.turn_weight else []
            missing |= turns.missing_texts(connection, with_turns, self._encoder.name) if with_turns else {}
        if view.blocked_by:
            return None
        self._embed(missing)
        return self._assemble(view, known)

    def _assemble(self, view: Outlook, known: dict[int, Task]) -> Formed | None:
        try:
            with transaction(self._engine) as connection:
                formed = assembly.assemble(connection, view, self._encoder.name, known)
        except VectorMissing:
            return None  # history moved on meanwhile; the next look embeds it
        if formed is None:
            return None
        self._known[view.policy_id] = formed.members.by_id | formed.past.by_id
        telemetry.BATCHES.labels(view.policy).inc()
        self._log.info("batch_formed", policy=view.policy, batch=formed.number, size=len(view.candidates))
        return formed

    def _embed(self, missing: Mapping[bytes, MissingText]) -> None:
        if not missing:
            return
        rows = self._encoder.encode([each.text for each in missing.values()]).astype("<f4")
        encoded = {digest: row.tobytes() for digest, row in zip(missing, rows, strict=True)}
        with transaction(self._engine) as connection:
            vectors.remember(connection, self._encoder.name, missing, encoded)
