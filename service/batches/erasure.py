"""Erasing a trace: its document and everything derived from it go, its id cannot come back.

Must run inside the caller's transaction. What stays: an anonymous row (the counts and batches that it
was part of still add up), the numbers of its grades, and a keyed hash of its id. Invariants: an erased
rollout serves no baseline any more; a batch not yet claimed is dissolved, one being trained makes a
version that is tainted at birth (outcomes.py); versions trained on it, and those grown from them, are
tainted. Versions whose baselines it merely informed are not: its reward moved a number there, no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Row, text

from service.baselines.turns import features_before, text_digest
from service.batches import outcomes
from service.batches.locks import hold_lineage
from service.database.documents import read_document
from service.errors import NotFound

_FIND = text("""
SELECT id, state FROM rollouts WHERE policy_id = :policy AND trace_id = :trace FOR UPDATE
""")

_IS_ERASED = text("""
SELECT EXISTS (SELECT FROM erasures
               WHERE policy_id = :policy AND digest = erasure_digest_v1(:policy, :trace))
""")

_TOMBSTONE = text("""
INSERT INTO erasures (policy_id, digest) VALUES (:policy, erasure_digest_v1(:policy, :trace))
ON CONFLICT DO NOTHING
""")

# A slash is in no id that a client can send.
_ANONYMISE = text("""
UPDATE rollouts SET erased_at = clock_timestamp(), trace_id = 'erased/' || id, task_key = 'erased/' || id,
    session_id = NULL, fingerprint = NULL, verdict_reasons = NULL, due_at = NULL, ready_at = NULL,
    gate_epoch = NULL,
    state = CASE WHEN state IN ('batched', 'trained') THEN state ELSE 'excluded' END,
    reason = CASE WHEN state IN ('batched', 'trained') THEN reason ELSE 'erased' END,
    reward = CASE WHEN state IN ('batched', 'trained') THEN reward END,
    reward_grades = CASE WHEN state IN ('batched', 'trained') THEN reward_grades END
WHERE id = :id
""")
_ANONYMISE_MEMBERSHIPS = text(
    "UPDATE batch_members SET task_key = 'erased/' || rollout_id WHERE rollout_id = :id"
)

_WORDS_OF_GRADES = text(
    "UPDATE grades SET comment = NULL, criteria = NULL WHERE rollout_id = :id"
    " AND (comment IS NOT NULL OR criteria IS NOT NULL)"
)
_DOCUMENT = text("DELETE FROM rollout_documents WHERE rollout_id = :id RETURNING normalised")
_FEATURES = text("DELETE FROM rollout_features WHERE rollout_id = :id RETURNING text_digest")

_GRADED_TURNS = text("SELECT DISTINCT turn FROM grades WHERE rollout_id = :id AND turn IS NOT NULL")

# Whether another rollout has the same text is not asked: its vector is made again when a batch needs it.
_EMBEDDINGS = text("DELETE FROM embeddings WHERE text_digest = :digest")

_DEAD_LETTERS = text("""
UPDATE dead_letters SET kept = 'hash', value = NULL, message_key = NULL, headers = '[]', detail = '',
    trace_id = NULL
WHERE policy_id = :policy AND trace_id = :trace
""")

_ALL_GRADES = text("DELETE FROM grades WHERE rollout_id = :id")
_REGISTRATION = text("DELETE FROM rollouts WHERE id = :id")

_UNCLAIMED = text("""
SELECT b.id, b.number FROM batch_members m JOIN batches b ON b.id = m.batch_id
WHERE m.rollout_id = :id AND m.live AND b.state = 'ready' AND b.claimed_token IS NULL
""")

_TRAINED_ON = text("""
SELECT v.version FROM batch_members m JOIN policy_versions v ON v.batch_id = m.batch_id
WHERE m.rollout_id = ANY(:ids) AND m.live
""")

_TAINT = text("""
WITH RECURSIVE grown AS (
    SELECT policy_id, version FROM policy_versions WHERE policy_id = :policy AND version = ANY(:versions)
    UNION
    -- weights go on into every version grown from a tainted one
    SELECT v.policy_id, v.version FROM policy_versions v
    JOIN grown g ON g.policy_id = v.policy_id AND v.parent = g.version
)
UPDATE policy_versions v SET tainted = v.tainted || CAST(:why AS text)
FROM grown g
WHERE v.policy_id = g.policy_id AND v.version = g.version AND CAST(:why AS text) <> ALL(v.tainted)
RETURNING v.version
""")


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure led to."""

    tainted_versions: list[int]
    dissolved_batches: list[int]
    """Numbers of the batches that had not been claimed yet."""


def erase(connection: Connection, policy_id: int, trace_id: str) -> Erased:
    """Erase a trace, or the grades that wait for it. Repeating it changes nothing. Raises NotFound."""
    hold_lineage(connection, policy_id)
    named = {"policy": policy_id, "trace": trace_id}
    letters = connection.execute(_DEAD_LETTERS, named).rowcount
    found = connection.execute(_FIND, named).one_or_none()
    if found is None:
        if letters or is_erased(connection, policy_id, trace_id):
            connection.execute(_TOMBSTONE, named)
            return Erased([], [])
        raise NotFound(f"There is no trace {trace_id!r}", code="trace_not_found")
    connection.execute(_TOMBSTONE, named)
    if found.state is None:
        connection.execute(_ALL_GRADES, {"id": found.id})
        connection.execute(_REGISTRATION, {"id": found.id})
        return Erased([], [])
    return _erase_rollout(connection, policy_id, found)


def is_erased(connection: Connection, policy_id: int, trace_id: str) -> bool:
    """Tell whether a trace of this id was erased."""
    erased: bool = connection.execute(_IS_ERASED, {"policy": policy_id, "trace": trace_id}).scalar_one()
    return erased


def trained_on(connection: Connection, rollouts: list[int]) -> list[int]:
    """Return the versions made of batches with these rollouts."""
    return sorted(set(connection.execute(_TRAINED_ON, {"ids": rollouts}).scalars()))


def taint(connection: Connection, policy_id: int, versions: list[int], why: str) -> list[int]:
    """Mark versions and all grown from them; return those that were not marked so already."""
    marked = connection.execute(_TAINT, {"policy": policy_id, "versions": versions, "why": why})
    return sorted(marked.scalars())


def _erase_rollout(connection: Connection, policy_id: int, found: Row[tuple[int, str]]) -> Erased:
    rollout = {"id": found.id}
    batches = connection.execute(_UNCLAIMED, rollout).all()
    connection.execute(_ANONYMISE, rollout)
    connection.execute(_ANONYMISE_MEMBERSHIPS, rollout)
    for batch in batches:
        outcomes.dissolve(connection, batch.id, "member_erased")
    connection.execute(_WORDS_OF_GRADES, rollout)
    turns = _turn_digests(connection, found.id, connection.execute(_DOCUMENT, rollout).scalars().all())
    # In one order, so that two erasures of the same texts wait for each other instead of for ever.
    for digest in sorted({*connection.execute(_FEATURES, rollout).scalars().all(), *turns}):
        connection.execute(_EMBEDDINGS, {"digest": digest})
    versions = trained_on(connection, [found.id])
    tainted = taint(connection, policy_id, versions, f"erased rollout {found.id}")
    return Erased(tainted, [batch.number for batch in batches])


def _turn_digests(connection: Connection, rollout: int, documents: Sequence[bytes]) -> list[bytes]:
    """Digests of the texts that graded turns were embedded by."""
    turns = connection.execute(_GRADED_TURNS, {"id": rollout}).scalars().all()
    read = [read_document(stored) for stored in documents] if turns else []
    return [text_digest(features_before(document, turn)) for document in read for turn in turns]
