"""Rollouts as a baseline may see them: rows of the database to `baselines.features.Task`.

Must run inside the caller's transaction. Knows the encoder by name only: vectors come from the cache,
and `missing_texts` says which are not there yet.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import orjson
import zstandard
from sqlalchemy import Connection, Row, text

from service.baselines.estimators import Scored
from service.baselines.features import Task, TaskFeatures
from service.batches import gates
from service.batches.vectors import MissingText, VectorMissing

NOTHING_KNOWN: Mapping[int, Task] = {}
_DIGEST_BYTES = 32

_HISTORY = text("""
SELECT id FROM rollouts
WHERE policy_id = :policy AND reward IS NOT NULL AND arrival IS NOT NULL AND erased_at IS NULL
  AND rewarded_at <= :cutoff AND id <> ALL(:members)
ORDER BY rewarded_at DESC, id DESC LIMIT :limit
""")

_TASKS = text("""
SELECT r.id, r.task_key, r.session_id, r.depth, f.features, f.content_digest, f.opening_digest,
       f.prompt_digests, e.vector
FROM unnest(CAST(:ids AS bigint[])) WITH ORDINALITY AS wanted (id, position)
JOIN rollouts r ON r.id = wanted.id
JOIN rollout_features f ON f.rollout_id = r.id
LEFT JOIN embeddings e ON e.text_digest = f.text_digest AND e.encoder = :encoder
ORDER BY wanted.position
""")

# A grade voided or a rollout erased since the window was read leaves it.
_REWARDS = text("""
SELECT id, reward FROM rollouts WHERE id = ANY(:ids) AND reward IS NOT NULL AND erased_at IS NULL
""")

# What is `batched` can come back when its batch is dissolved, what waits can become ready.
_SETTLED = text("""
SELECT id FROM rollouts
WHERE id = ANY(:ids)
  AND (state = 'trained' OR state = 'excluded' AND (reason = ANY(:final) OR reason LIKE 'untrainable:%'))
""")

_MISSING = text("""
SELECT DISTINCT ON (f.text_digest) f.text_digest, f.rollout_id, f.features FROM rollout_features f
LEFT JOIN embeddings e ON e.text_digest = f.text_digest AND e.encoder = :encoder
WHERE f.rollout_id = ANY(:ids) AND e.text_digest IS NULL
""")


@dataclass(frozen=True, slots=True)
class Rewarded:
    """Rollouts with their ids, in the order that the estimator sees them."""

    ids: list[int]
    scored: Scored

    def among(self, ids: Set[int]) -> "Rewarded":
        """Those of the ids given, in the same order."""
        places = [at for at, id_ in enumerate(self.ids) if id_ in ids]
        scored = Scored([self.scored.tasks[at] for at in places], self.scored.rewards[places])
        return Rewarded([self.ids[at] for at in places], scored)

    @property
    def by_id(self) -> dict[int, Task]:
        """The tasks, for `load` to know when it reads the next window."""
        return dict(zip(self.ids, self.scored.tasks, strict=True))


def window(
    connection: Connection, policy_id: int, *, cutoff: object, members: Sequence[int], limit: int
) -> list[int]:
    """Return the last `limit` rewarded rollouts up to the cut-off, oldest first, without the members."""
    found = connection.execute(
        _HISTORY, {"policy": policy_id, "cutoff": cutoff, "members": list(members), "limit": limit}
    ).scalars()
    return list(found)[::-1]


def settled(connection: Connection, ids: Sequence[int]) -> set[int]:
    """Return those of the rollouts that can never enter a batch again."""
    asked = {"ids": list(ids), "final": list(gates.FINAL)}
    return set(connection.execute(_SETTLED, asked).scalars())


def load(
    connection: Connection, ids: Sequence[int], encoder: str, known: Mapping[int, Task] = NOTHING_KNOWN
) -> Rewarded:
    """Read rollouts with rewards, in the order of `ids`. Raises VectorMissing.

    `known`: tasks read before with the same encoder. A rollout's task never changes, its reward may.
    """
    new = [id_ for id_ in ids if id_ not in known]
    rows = connection.execute(_TASKS, {"ids": new, "encoder": encoder}).all() if new else []
    if any(row.vector is None for row in rows):
        raise VectorMissing
    inflate = zstandard.ZstdDecompressor()  # making one costs more than what it inflates here
    tasks = {**known, **{row.id: _task(row, inflate) for row in rows}}
    rewards = {row.id: row.reward for row in connection.execute(_REWARDS, {"ids": list(ids)})}
    kept = [id_ for id_ in ids if id_ in tasks and id_ in rewards]
    scored = Scored([tasks[id_] for id_ in kept], np.array([rewards[id_] for id_ in kept], dtype=np.float64))
    return Rewarded(kept, scored)


def missing_texts(connection: Connection, ids: Sequence[int], encoder: str) -> dict[bytes, MissingText]:
    """Return the feature texts of these rollouts that the cache has no vector of, by digest."""
    rows = connection.execute(_MISSING, {"ids": list(ids), "encoder": encoder})
    inflate = zstandard.ZstdDecompressor()
    return {
        row.text_digest: MissingText(row.rollout_id, _features(row.features, inflate).text) for row in rows
    }


def _task(row: Row[tuple[object, ...]], inflate: zstandard.ZstdDecompressor) -> Task:
    packed: bytes = row.prompt_digests
    return Task(
        features=_features(row.features, inflate),
        embedding=np.frombuffer(row.vector, dtype="<f4"),
        task_key=row.task_key,
        session_id=row.session_id,
        content_hash=row.content_digest,
        opening_hash=row.opening_digest,
        prompt_hashes=frozenset(
            packed[at : at + _DIGEST_BYTES] for at in range(0, len(packed), _DIGEST_BYTES)
        ),
        depth=row.depth or 0,
    )


def _features(stored: bytes, inflate: zstandard.ZstdDecompressor) -> TaskFeatures:
    return TaskFeatures(**orjson.loads(inflate.decompress(stored)))
