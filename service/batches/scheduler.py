"""The scheduler's loop: due gates, missing embeddings, assembly, a policy at a time.

Any number may run: assembly is locked a policy at a time inside one transaction, everything else is
idempotent. One dying costs the others nothing. Vectors are computed before the transaction that
uses them, so no lock is held while a model runs.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Engine, text

from service import telemetry
from service.batches import assembly, gates, history
from service.batches.assembly import Outlook
from service.database.engine import transaction
from service.errors import Unavailable

_POLICIES = text("SELECT id FROM policies WHERE NOT paused ORDER BY id")


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
        """Look once at every policy; return how many batches were formed."""
        with transaction(self._engine) as connection:
            gates.evaluate_due(connection)
            policies = list(connection.execute(_POLICIES).scalars())
        return sum(self._form(policy) for policy in policies)

    def _form(self, policy_id: int) -> int:
        with transaction(self._engine) as connection:
            view = assembly.outlook(connection, policy_id)
            needed = [] if view.blocked_by else assembly.needed_rollouts(connection, view)
            missing = history.missing_texts(connection, needed, self._encoder.name)
        if view.blocked_by:
            return 0
        self._embed(missing)
        return self._assemble(view)

    def _assemble(self, view: Outlook) -> int:
        try:
            with transaction(self._engine) as connection:
                batch = assembly.assemble(connection, view, self._encoder.name)
        except history.EmbeddingMissing:
            return 0  # history moved on meanwhile; the next look embeds it
        if batch is None:
            return 0
        telemetry.BATCHES.labels(view.policy).inc()
        self._log.info("batch_formed", policy=view.policy, batch=batch, size=len(view.candidates))
        return 1

    def _embed(self, missing: dict[bytes, str]) -> None:
        if not missing:
            return
        vectors = self._encoder.encode(list(missing.values())).astype("<f4")
        with transaction(self._engine) as connection:
            history.remember(
                connection,
                self._encoder.name,
                {digest: vector.tobytes() for digest, vector in zip(missing, vectors, strict=True)},
            )
