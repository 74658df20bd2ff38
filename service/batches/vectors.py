"""The cache of sentence vectors: by the digest of a text and the encoder's name.

Must run inside the caller's transaction. Knows no features: whoever needs a vector says of which rollout
its text is a part. Invariants: nothing is cached of a rollout that has been erased; any vector may go at any
time, also that of a text which another rollout has: whoever finds none has the text embedded and tries again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

_KNOWN = text("""
SELECT text_digest, vector FROM embeddings WHERE encoder = :encoder AND text_digest = ANY(:digests)
""")

_REMEMBER = text("""
WITH kept AS (
    -- an erasure of one of these waits for this transaction, or has removed the row already
    SELECT rollout_id FROM rollout_features WHERE rollout_id = ANY(:ids) ORDER BY rollout_id FOR KEY SHARE
)
INSERT INTO embeddings (text_digest, encoder, vector)
SELECT digest, :encoder, vector
FROM unnest(CAST(:ids AS bigint[]), CAST(:digests AS bytea[]), CAST(:vectors AS bytea[]))
     AS new (id, digest, vector)
WHERE id IN (SELECT rollout_id FROM kept)
ORDER BY digest ON CONFLICT DO NOTHING
""")


@dataclass(frozen=True, slots=True)
class MissingText:
    """A text without a vector, and a rollout that it is part of."""

    rollout_id: int
    text: str


class VectorMissing(Exception):
    """A text has no cached vector yet; embed it and try again."""


def known(connection: Connection, encoder: str, digests: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return the vectors that are cached of these texts."""
    wanted = sorted(set(digests))
    if not wanted:
        return {}
    rows = connection.execute(_KNOWN, {"encoder": encoder, "digests": wanted})
    return {bytes(row.text_digest): bytes(row.vector) for row in rows}


def remember(
    connection: Connection, encoder: str, missing: Mapping[bytes, MissingText], vectors: Mapping[bytes, bytes]
) -> None:
    """Put vectors into the cache, unless their rollouts were erased meanwhile."""
    connection.execute(
        _REMEMBER,
        {
            "ids": [missing[digest].rollout_id for digest in vectors], "encoder": encoder,
            "digests": list(vectors), "vectors": list(vectors.values()),
        },
    )  # fmt: skip
