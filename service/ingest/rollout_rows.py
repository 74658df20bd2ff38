"""Statements on `rollouts` and their documents: many rows each, keys sorted.

Must run inside the writer's transaction. Invariant: a trace's columns are set once, by the delivery
whose `arrival` the row keeps.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast

from sqlalchemy import Connection, text

from service.ingest import arrays
from service.ingest.grades import NewGrade
from service.ingest.rollouts import NewRollout

_ARRIVING: dict[str, tuple[str, Callable[[Iterable[Any]], arrays.Array]]] = {
    "arrival": ("bigint", arrays.bigints),
    "canonicaliser": ("integer", arrays.integers),
    "fingerprint": ("bytea", arrays.byteas),
    "status": ("text", arrays.texts),
    "task_key": ("text", arrays.texts),
    "session_id": ("text", arrays.texts),
    "version": ("integer", arrays.integers),
    "depth": ("integer", arrays.integers),
    "verdict": ("text", arrays.texts),
    "verdict_reasons": ("text", arrays.texts),
    "state": ("text", arrays.texts),
    "reason": ("text", arrays.texts),
}
"""Columns that the trace brings, with type and encoder; null while only grades have come."""

_DOCUMENTS = (
    "raw", "normalised", "features", "text_digest", "content_digest", "opening_digest", "prompt_digests",
)  # fmt: skip
_COLUMNS = ("policy_id", "trace_id", *_ARRIVING, *_DOCUMENTS)
_SELECTED = [
    "string_to_array(verdict_reasons, ',')" if name == "verdict_reasons" else name for name in _ARRIVING
]
_BROUGHT = [f"{name} = excluded.{name}" for name in (*_ARRIVING, "received_at")]
_ARRAYS = [
    "CAST(:policy_id AS bigint[])", "CAST(:trace_id AS text[])",
    *(f"CAST(:{name} AS {kind}[])" for name, (kind, _) in _ARRIVING.items()),
    *(f"CAST(:{name} AS bytea[])" for name in _DOCUMENTS),
]  # fmt: skip

_REGISTER = text(f"""
WITH new AS MATERIALIZED (
    SELECT * FROM unnest({", ".join(_ARRAYS)}) AS new ({", ".join(_COLUMNS)})
), registered AS (
    INSERT INTO rollouts AS r (policy_id, trace_id, {", ".join(_ARRIVING)}, received_at)
    SELECT policy_id, trace_id, {", ".join(_SELECTED)},
           CASE WHEN arrival IS NOT NULL THEN clock_timestamp() END
    FROM new
    -- an erased trace cannot come back: it gets no row
    WHERE NOT EXISTS (SELECT FROM erasures e WHERE e.policy_id = new.policy_id
                      AND e.digest = erasure_digest_v1(new.policy_id, new.trace_id))
    -- every writer locks registry rows in this order
    ORDER BY policy_id, trace_id
    -- a row for which the condition does not hold is locked all the same, but neither written nor returned
    ON CONFLICT (policy_id, trace_id) DO UPDATE SET {", ".join(_BROUGHT)}
        WHERE r.arrival IS NULL AND excluded.arrival IS NOT NULL
    RETURNING id, policy_id, trace_id, arrival, canonicaliser, fingerprint, verdict, verdict_reasons, state,
              reason, xmax = 0 AS inserted, clock_timestamp() AS now
), accepted AS (
    -- the row keeps the arrival of the one delivery that it took
    SELECT r.id, r.now, new.* FROM registered r JOIN new USING (arrival)
), documents AS (
    INSERT INTO rollout_documents (rollout_id, policy_id, received_at, raw, normalised)
    SELECT id, policy_id, now, raw, normalised FROM accepted
), features AS (
    INSERT INTO rollout_features
        (rollout_id, features, text_digest, content_digest, opening_digest, prompt_digests)
    SELECT id, features, text_digest, content_digest, opening_digest, prompt_digests FROM accepted
)
SELECT id, policy_id, trace_id, arrival, state, reason, inserted, now,
       canonicaliser, fingerprint, verdict, verdict_reasons
FROM registered
""")  # noqa: S608 - column names are ours

# Locks rows as the upsert would, in its order, where at least :least of them are there; else none. It shows
# what its locks waited for.
_LOCK = text("""
WITH wanted AS (
    SELECT * FROM unnest(CAST(:policy_id AS bigint[]), CAST(:trace_id AS text[])) AS w (policy_id, trace_id)
)
SELECT r.id, r.policy_id, r.trace_id, r.arrival, r.state, r.reason, false, clock_timestamp(),
       r.canonicaliser, r.fingerprint, r.verdict, r.verdict_reasons
FROM wanted JOIN rollouts r USING (policy_id, trace_id)
WHERE (SELECT count(*) FROM wanted JOIN rollouts USING (policy_id, trace_id)) >= :least
ORDER BY r.policy_id, r.trace_id FOR UPDATE OF r
""")

_VERSIONS = text("""
SELECT v.policy_id, v.version, v.depth, v.adapter_sha256
FROM policy_versions v
JOIN unnest(CAST(:policy_id AS bigint[]), CAST(:version AS integer[]), CAST(:sha256 AS text[]))
     AS claim (policy_id, version, sha256)
  ON v.policy_id = claim.policy_id AND (v.version = claim.version OR v.adapter_sha256 = claim.sha256)
""")

Verdict = Literal["exact", "ids", "text", "untrainable"]
Key = tuple[int, str]
"""(policy id, trace id)"""
KnownVersions = dict[tuple[int, int | str], tuple[int, int]]
"""(policy id, version or sha256 of the adapter) -> (version, depth). Both never change, so it may be kept."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A registry row as it stands after the upsert, locked until the transaction ends."""

    id: int
    canonicaliser: int | None
    fingerprint: bytes | None
    verdict: Verdict
    verdict_reasons: list[str]
    state: str | None
    reason: str
    inserted: bool
    now: datetime
    accepted: NewRollout | None
    """The item whose trace the row took just now."""


def register(
    connection: Connection, items: Sequence[NewRollout | NewGrade], known: KnownVersions
) -> dict[Key, Registered]:
    """Upsert and lock every item's registry row and store what new traces say.

    Of several traces of one id the first one counts. `known` is looked up and added to.
    """
    first: dict[Key, NewRollout | NewGrade] = {}
    for item in items:
        key = (item.policy_id, item.trace_id)
        if key not in first or (isinstance(item, NewRollout) and isinstance(first[key], NewGrade)):
            first[key] = item
    traces = [item for item in first.values() if isinstance(item, NewRollout)]
    found: list[Any] = []
    if not traces:  # grades mostly come after their traces: there is nothing to insert then
        found += connection.execute(_LOCK, _keys(first) | {"least": len(first)})
    if left := first.keys() - _found(found):
        _look_up(connection, traces, known)
        found += connection.execute(
            _REGISTER, _encoded([_row(first[key], known) for key in first if key in left])
        )
    if left := first.keys() - _found(found):  # there before, and locked by now, unless they were erased
        found += connection.execute(_LOCK, _keys(left) | {"least": 0})
    return {(row[1], row[2]): _registered(row, first[row[1], row[2]]) for row in found}


def _found(rows: list[Any]) -> set[Key]:
    return {(row[1], row[2]) for row in rows}


def _registered(row: Any, item: NewRollout | NewGrade) -> Registered:
    # By position: names cost a lookup each, twelve a row.
    id_, _, _, arrival, state, reason, inserted, now, canonicaliser, fingerprint, verdict, reasons = row
    mine = isinstance(item, NewRollout) and arrival == item.arrival
    return Registered(
        id_, canonicaliser, fingerprint, cast(Verdict, verdict), reasons or [], state, reason, inserted, now,
        cast(NewRollout, item) if mine else None,
    )  # fmt: skip


def _look_up(connection: Connection, rollouts: list[NewRollout], known: KnownVersions) -> None:
    unknown = [
        item
        for item in rollouts
        if (claim := _claim(item)) is not None and (item.policy_id, claim) not in known
    ]
    if not unknown:
        return
    claims = {
        "policy_id": [item.policy_id for item in unknown],
        "version": [item.version for item in unknown],
        "sha256": [item.adapter_sha256 for item in unknown],
    }
    for row in connection.execute(_VERSIONS, claims):
        for name in (row.version, row.adapter_sha256):
            if name is not None:
                known[row.policy_id, name] = (row.version, row.depth)


def _claim(item: NewRollout) -> int | str | None:
    return item.version if item.version is not None else item.adapter_sha256


_EMPTY: dict[str, Any] = dict.fromkeys((*_ARRIVING, *_DOCUMENTS)) | {"reason": ""}


def _row(item: NewRollout | NewGrade, known: KnownVersions) -> dict[str, Any]:
    if isinstance(item, NewGrade):
        return _EMPTY | {"policy_id": item.policy_id, "trace_id": item.trace_id}
    claim = _claim(item)
    version, depth = (None, None) if claim is None else known.get((item.policy_id, claim), (None, None))
    verdict, reasons = item.trainability.verdict, item.trainability.reasons
    if version is None:
        verdict, reasons = "untrainable", ["no_version" if claim is None else "unknown_version", *reasons]
    exclusion = f"untrainable:{reasons[0]}" if verdict == "untrainable" else item.excluded_as
    columns = item.columns()
    return {name: getattr(columns, name) for name in _DOCUMENTS} | {
        "policy_id": item.policy_id,
        "trace_id": item.trace_id,
        "arrival": item.arrival,
        "canonicaliser": item.canonicaliser,
        "fingerprint": columns.fingerprint,
        "status": item.status,
        "task_key": columns.task_key,
        "session_id": item.session_id,
        "version": version,
        "depth": depth,
        "verdict": verdict,
        "verdict_reasons": ",".join(reasons),
        "state": "excluded" if exclusion else "waiting_reward",
        "reason": exclusion or "no_grade",
    }


def _keys(keys: Collection[Key]) -> dict[str, Any]:
    return {
        "policy_id": arrays.bigints(policy for policy, _ in keys),
        "trace_id": arrays.texts(trace for _, trace in keys),
    }


def _encoded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    encoded = _keys([(row["policy_id"], row["trace_id"]) for row in rows])
    encoded |= {name: encode([row[name] for row in rows]) for name, (_, encode) in _ARRIVING.items()}
    return encoded | {name: arrays.byteas([row[name] for row in rows]) for name in _DOCUMENTS}
