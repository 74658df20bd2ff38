"""Statements on `rollouts` and their documents: many rows each, keys sorted.

Must run inside the writer's transaction. Invariant: a trace's columns are set once, by the delivery
whose `arrival` the row keeps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, cast

from sqlalchemy import Connection, text

from service.ingest.formats.native import CANONICALISER
from service.ingest.grades import NewGrade
from service.ingest.rollouts import NewRollout, exclusion
from service.policies import PolicySettings
from service.schemas import Trainability

_ARRIVING = {
    "arrival": "bigint",
    "fingerprint": "bytea",
    "status": "text",
    "task_key": "text",
    "session_id": "text",
    "version": "integer",
    "depth": "integer",
    "verdict": "text",
    "verdict_reasons": "text",
    "state": "text",
    "reason": "text",
}
"""Columns that the trace brings, with their types; null while only grades have come."""

_REGISTER = text(f"""
INSERT INTO rollouts AS r (policy_id, trace_id, {", ".join(_ARRIVING)}, canonicaliser, received_at)
SELECT policy_id, trace_id, {
    ", ".join(
        "string_to_array(verdict_reasons, ',')" if name == "verdict_reasons" else name for name in _ARRIVING
    )
},
       CASE WHEN arrival IS NOT NULL THEN {CANONICALISER} END,
       CASE WHEN arrival IS NOT NULL THEN clock_timestamp() END
FROM unnest(CAST(:policy_id AS bigint[]), CAST(:trace_id AS text[]),
            {", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in _ARRIVING.items())})
     AS new (policy_id, trace_id, {", ".join(_ARRIVING)})
-- every writer locks registry rows in this order
ORDER BY policy_id, trace_id
ON CONFLICT (policy_id, trace_id) DO UPDATE SET
    {
    ", ".join(
        f"{name} = CASE WHEN r.arrival IS NULL THEN excluded.{name} ELSE r.{name} END"
        for name in (*_ARRIVING, "canonicaliser", "received_at")
    )
}
RETURNING id, policy_id, trace_id, arrival, fingerprint, verdict, verdict_reasons, state, reason,
          xmax = 0 AS inserted, clock_timestamp() AS now
""")  # noqa: S608 - column names are ours

_STORE_DOCUMENTS = text("""
INSERT INTO rollout_documents (rollout_id, raw, normalised)
SELECT * FROM unnest(CAST(:rollout_id AS bigint[]), CAST(:raw AS bytea[]), CAST(:normalised AS bytea[]))
""")

_STORE_FEATURES = text("""
INSERT INTO rollout_features (rollout_id, features, text_digest, content_digest, opening_digest, prompt_digests)
SELECT * FROM unnest(CAST(:rollout_id AS bigint[]), CAST(:features AS bytea[]), CAST(:text_digest AS bytea[]),
    CAST(:content_digest AS bytea[]), CAST(:opening_digest AS bytea[]), CAST(:prompt_digests AS bytea[]))
""")

_VERSIONS = text("""
SELECT v.policy_id, v.version, v.depth, v.adapter_sha256
FROM policy_versions v
JOIN unnest(CAST(:policy_id AS bigint[]), CAST(:version AS integer[]), CAST(:sha256 AS text[]))
     AS claim (policy_id, version, sha256)
  ON v.policy_id = claim.policy_id AND (v.version = claim.version OR v.adapter_sha256 = claim.sha256)
""")

_SETTINGS = text("""
SELECT p.id, s.document FROM policies p
JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
WHERE p.id = ANY(:ids)
""")

Verdict = Literal["exact", "ids", "text", "untrainable"]


@dataclass(frozen=True, slots=True)
class Registered:
    """A registry row as it stands after the upsert, locked until the transaction ends."""

    id: int
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
    connection: Connection, items: Sequence[NewRollout | NewGrade]
) -> dict[tuple[int, str], Registered]:
    """Upsert and lock the registry row of every item; of several traces of one id the first one counts."""
    first = {(item.policy_id, item.trace_id): item for item in reversed(items)}
    first |= {
        (item.policy_id, item.trace_id): item for item in reversed(items) if isinstance(item, NewRollout)
    }
    rows = [_row(item) for item in _resolved(connection, first.values())]
    columns = {name: [row[name] for row in rows] for name in ("policy_id", "trace_id", *_ARRIVING)}
    found = connection.execute(_REGISTER, columns).all()
    registry = {}
    for row in found:
        item = first[row.policy_id, row.trace_id]
        mine = isinstance(item, NewRollout) and row.arrival == item.arrival
        registry[row.policy_id, row.trace_id] = Registered(
            row.id, row.fingerprint, cast(Verdict, row.verdict), row.verdict_reasons or [], row.state,
            row.reason, row.inserted, row.now, cast(NewRollout, item) if mine else None,
        )  # fmt: skip
    return registry


def store_documents(connection: Connection, registry: dict[tuple[int, str], Registered]) -> None:
    """Insert what the newly accepted traces say, apart from the hot rows."""
    rows = [(row.id, row.accepted) for row in registry.values() if row.accepted is not None]
    if not rows:
        return
    ids = [rollout_id for rollout_id, _ in rows]
    for statement, names in (
        (_STORE_DOCUMENTS, ("raw", "normalised")),
        (
            _STORE_FEATURES,
            ("features", "text_digest", "content_digest", "opening_digest", "prompt_digests"),
        ),
    ):
        columns = {name: [getattr(item, name) for _, item in rows] for name in names}
        connection.execute(statement, {"rollout_id": ids, **columns})


@dataclass(frozen=True, slots=True)
class _Resolved:
    """An item with its version looked up and its first state decided."""

    item: NewRollout | NewGrade
    version: int | None = None
    depth: int | None = None
    trainability: Trainability = field(default_factory=lambda: Trainability(verdict="untrainable"))
    reason: str = ""


_Known = dict[tuple[int, int | str], tuple[int, int]]
"""(policy id, version or sha256 of the adapter) -> (version, depth)"""


def _resolved(connection: Connection, items: Iterable[NewRollout | NewGrade]) -> list[_Resolved]:
    items = list(items)
    rollouts = [item for item in items if isinstance(item, NewRollout)]
    if not rollouts:
        return [_Resolved(item) for item in items]
    known = _known_versions(connection, rollouts)
    policies = sorted({item.policy_id for item in rollouts})
    settings = {
        row.id: PolicySettings.model_validate(row.document)
        for row in connection.execute(_SETTINGS, {"ids": policies})
    }
    return [
        _resolve(item, known, settings[item.policy_id]) if isinstance(item, NewRollout) else _Resolved(item)
        for item in items
    ]


def _known_versions(connection: Connection, rollouts: list[NewRollout]) -> _Known:
    claims = {
        "policy_id": [item.policy_id for item in rollouts],
        "version": [item.version for item in rollouts],
        "sha256": [item.adapter_sha256 for item in rollouts],
    }
    return {
        (row.policy_id, name): (row.version, row.depth)
        for row in connection.execute(_VERSIONS, claims)
        for name in (row.version, row.adapter_sha256)
        if name is not None
    }


def _resolve(item: NewRollout, known: _Known, settings: PolicySettings) -> _Resolved:
    claim = item.version if item.version is not None else item.adapter_sha256
    version, depth = (None, None) if claim is None else known.get((item.policy_id, claim), (None, None))
    trainability = item.trainability
    if version is None:
        missing = "no_version" if claim is None else "unknown_version"
        trainability = Trainability(verdict="untrainable", reasons=[missing, *trainability.reasons])
    return _Resolved(item, version, depth, trainability, exclusion(item.status, trainability, settings))


def _row(resolved: _Resolved) -> dict[str, object]:
    item = resolved.item
    empty: dict[str, object] = dict.fromkeys(_ARRIVING)
    if isinstance(item, NewGrade):
        return empty | {"policy_id": item.policy_id, "trace_id": item.trace_id, "reason": ""}
    return {
        "policy_id": item.policy_id,
        "trace_id": item.trace_id,
        "arrival": item.arrival,
        "fingerprint": item.fingerprint,
        "status": item.status,
        "task_key": item.task_key,
        "session_id": item.session_id,
        "version": resolved.version,
        "depth": resolved.depth,
        "verdict": resolved.trainability.verdict,
        "verdict_reasons": ",".join(resolved.trainability.reasons),
        "state": "excluded" if resolved.reason else "waiting_reward",
        "reason": resolved.reason or "no_grade",
    }
