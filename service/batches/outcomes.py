"""What becomes of a batch: trained, ended without a step, failed, dissolved. The fenced step's commit.

Every function but `dissolve` is one transaction of its own that first locks the lineage row under the
caller's fencing token. Invariants: a version is made exactly once a batch, together with the
batch's and its members' states; nothing is trained that does not count in `policy_versions`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import Connection, Engine, text

from service.batches import gates, pauses, trust
from service.batches.leases import Lease, hold
from service.database.engine import transaction
from service.errors import LeaseLost

NoStep = Literal["no_signal", "all_gated_out", "none_trainable"]

_NEW_VERSION = text("""
INSERT INTO policy_versions (policy_id, version, parent, depth, batch_id, fencing_token, folder, manifest,
                             manifest_sha256, adapter_sha256, tainted)
VALUES (:policy, :version, :parent, :depth, :batch, :token, :folder, CAST(:manifest AS jsonb),
        :manifest_sha256, :adapter_sha256, :tainted)
""")

# Promotion is by the settings of now, not those that the batch was formed under.
_ADVANCE = text("""
UPDATE lineages l SET head_version = :version, head_depth = :depth, next_version = :version + 1,
    promoted_version = CASE WHEN coalesce(s.document #>> '{promotion,mode}', 'auto') = 'auto'
                                 AND NOT l.promotion_held
                            THEN :version ELSE l.promoted_version END
FROM policies p JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
WHERE l.policy_id = :policy AND p.id = l.policy_id
""")

_END_BATCH = text("""
UPDATE batches SET state = :state, outcome = :outcome, policy_tokens = :tokens, trainable = :trainable,
    metrics = CAST(:metrics AS jsonb), claimed_token = NULL, ended_at = clock_timestamp()
WHERE id = :batch AND state = 'ready' RETURNING id
""")

# What makes a version tainted at birth: it inherits, or a member's trace or grade went bad meanwhile.
_TAINTS = text(f"""
SELECT unnest(tainted) FROM policy_versions WHERE policy_id = :policy AND version = :parent
UNION
SELECT 'erased rollout ' || r.id FROM batch_members m JOIN rollouts r ON r.id = m.rollout_id
WHERE m.batch_id = :batch AND m.live AND r.erased_at IS NOT NULL
UNION
SELECT 'quarantined grader ' || grader FROM ({trust.RESTED_ON}) AS rested_on
ORDER BY 1
""")  # noqa: S608 - our own statement

_LOCK_MEMBERS = text("""
SELECT r.id FROM rollouts r JOIN batch_members m ON m.rollout_id = r.id
WHERE m.batch_id = :batch AND m.live ORDER BY r.id FOR UPDATE OF r
""")

_JUDGE_MEMBERS = text("""
UPDATE batch_members m SET verdict = v.verdict, reason = v.reason,
    live = m.live AND v.reason NOT LIKE 'untrainable:%'
FROM unnest(CAST(:ids AS bigint[]), CAST(:verdicts AS text[]), CAST(:reasons AS text[]))
     AS v (id, verdict, reason)
WHERE m.batch_id = :batch AND m.rollout_id = v.id
""")

_TRAINED = text("""
UPDATE rollouts r SET state = 'trained',
    reason = CASE WHEN m.reason = '' THEN 'version ' || :version ELSE m.reason END
FROM batch_members m WHERE m.batch_id = :batch AND m.live AND r.id = m.rollout_id
""")

_REJECTED = text("""
UPDATE rollouts r SET state = 'excluded', verdict = 'untrainable',
    reason = CASE WHEN r.erased_at IS NULL THEN m.reason ELSE 'erased' END
FROM batch_members m
WHERE m.batch_id = :batch AND NOT m.live AND m.reason LIKE 'untrainable:%' AND r.id = m.rollout_id
  AND r.state = 'batched'
""")

_UNTRAINED = text("""
UPDATE rollouts r SET state = 'excluded',
    reason = CASE WHEN r.erased_at IS NULL THEN :outcome ELSE 'erased' END
FROM batch_members m WHERE m.batch_id = :batch AND m.live AND r.id = m.rollout_id AND r.state = 'batched'
""")

_LET_GO = text("UPDATE batch_members SET live = false WHERE batch_id = :batch AND live")

_DISSOLVE = text("""
UPDATE batches SET state = 'dissolved', outcome = :reason, claimed_token = NULL, ended_at = clock_timestamp()
WHERE id = :batch AND state = 'ready'
""")

_BACK_TO_READY = text("""
UPDATE rollouts r SET state = CASE WHEN r.erased_at IS NULL THEN 'ready' ELSE 'excluded' END,
    reason = CASE WHEN r.erased_at IS NULL THEN '' ELSE 'erased' END
FROM batch_members m
WHERE m.batch_id = :batch AND m.live AND r.id = m.rollout_id AND r.state = 'batched'
RETURNING r.id
""")

_FAIL = text("""
UPDATE batches SET failures = failures + 1, claimed_token = NULL, diagnosis = :diagnosis
WHERE id = :batch RETURNING failures
""")

_FREE_CLAIM = text("UPDATE batches SET claimed_token = NULL WHERE id = :batch AND claimed_token = :token")

_POISON = text("""
UPDATE batch_members SET live = false, reason = 'poison: ' || left(:diagnosis, 500)
WHERE batch_id = :batch AND rollout_id = ANY(:ids)
""")

_POISONED = text("""
UPDATE rollouts SET state = 'excluded', reason = CASE WHEN erased_at IS NULL THEN 'poison' ELSE 'erased' END
WHERE id = ANY(:ids) AND state = 'batched'
""")

# Whoever resumes has seen them.
_FORGIVE = text("UPDATE batches SET deaths = 0 WHERE policy_id = :policy AND state = 'ready'")

_COMMITTED = text("SELECT version FROM policy_versions WHERE batch_id = :batch AND fencing_token = :token")


@dataclass(frozen=True, slots=True)
class Judgement:
    """The trainer's verdict on one member; reason `untrainable:…` takes it out, `gated_out` does not."""

    verdict: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """What the trainer says of a batch that it has finished with."""

    judgements: Mapping[int, Judgement]
    policy_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """A version's files in the store, written, verified and probed; nothing vouches for them yet."""

    folder: str
    manifest: Mapping[str, Any]
    manifest_sha256: str
    adapter_sha256: str


@dataclass(frozen=True, slots=True)
class Step:
    """A finished optimizer step, ready to count."""

    batch_id: int
    parent: int
    version: int
    published: Published
    record: Record


def commit_step(engine: Engine, lease: Lease, step: Step) -> None:
    """Make the step count: version, head, batch and members in one transaction, under the fencing token.

    Raises LeaseLost when the token is old or the head moved: the files are then nobody's. Raises
    Unavailable when the commit's answer is lost: see `committed_version`.
    """
    with transaction(engine) as connection:
        head = hold(connection, lease)
        if head.version != step.parent or head.next_version != step.version:
            raise LeaseLost(f"The head is version {head.version}, not {step.parent}")
        connection.execute(_LOCK_MEMBERS, {"batch": step.batch_id})
        taints = connection.execute(
            _TAINTS, {"policy": lease.policy_id, "parent": step.parent, "batch": step.batch_id}
        )
        tainted = list(taints.scalars())
        _judge(connection, step.batch_id, step.record)
        _end(connection, step.batch_id, "trained", "", step.record)
        files = step.published
        made = {"policy": lease.policy_id, "version": step.version, "depth": head.depth + 1}
        connection.execute(
            _NEW_VERSION,
            {
                **made, "parent": step.parent, "batch": step.batch_id, "token": lease.token,
                "folder": files.folder, "manifest": json.dumps(files.manifest),
                "manifest_sha256": files.manifest_sha256, "adapter_sha256": files.adapter_sha256,
                "tainted": tainted,
            },
        )  # fmt: skip
        connection.execute(_TRAINED, {"batch": step.batch_id, "version": str(step.version)})
        connection.execute(_ADVANCE, made)


def committed_version(engine: Engine, lease: Lease, batch_id: int) -> int | None:
    """After a lost answer: the version that my token made of this batch, None if there is none."""
    with transaction(engine) as connection:
        found: int | None = connection.execute(
            _COMMITTED, {"batch": batch_id, "token": lease.token}
        ).scalar_one_or_none()
        return found


def end_without_step(engine: Engine, lease: Lease, batch_id: int, outcome: NoStep, record: Record) -> None:
    """End a batch that makes no version; its members are excluded with the reason. Raises LeaseLost."""
    with transaction(engine) as connection:
        hold(connection, lease)
        connection.execute(_LOCK_MEMBERS, {"batch": batch_id})
        _judge(connection, batch_id, record)
        _end(connection, batch_id, "no_step", outcome, record)
        connection.execute(_UNTRAINED, {"batch": batch_id, "outcome": outcome})
        connection.execute(_LET_GO, {"batch": batch_id})


def record_failure(engine: Engine, lease: Lease, batch_id: int, diagnosis: str) -> int:
    """Count a failure that rows, forward or backward raised; return how many there are now."""
    with transaction(engine) as connection:
        hold(connection, lease)
        return int(connection.execute(_FAIL, {"batch": batch_id, "diagnosis": diagnosis[:2000]}).scalar_one())


def put_back(engine: Engine, lease: Lease, batch_id: int) -> None:
    """Free a claim after trouble that is not the batch's fault (storage, database, probe, shutdown)."""
    with transaction(engine) as connection:
        connection.execute(_FREE_CLAIM, {"batch": batch_id, "token": lease.token})


def exclude_poison(engine: Engine, lease: Lease, batch_id: int, guilty: Mapping[int, str]) -> None:
    """Take the guilty rollouts out of the batch; the others keep their b_i and the denominator."""
    with transaction(engine) as connection:
        hold(connection, lease)
        connection.execute(_LOCK_MEMBERS, {"batch": batch_id})
        for rollout, diagnosis in guilty.items():
            connection.execute(_POISON, {"batch": batch_id, "ids": [rollout], "diagnosis": diagnosis})
        connection.execute(_POISONED, {"ids": sorted(guilty)})


def pause_policy(engine: Engine, lease: Lease, code: str, reason: str) -> None:
    """Stop forming and training batches of this policy, and say why, until somebody resumes it."""
    with transaction(engine) as connection:
        hold(connection, lease)
        pauses.pause(connection, lease.policy_id, code, reason)
        connection.execute(_FORGIVE, {"policy": lease.policy_id})


def dissolve(connection: Connection, batch_id: int, reason: str) -> None:
    """Give a ready batch's members back. Runs in the caller's transaction, which holds the lineage.

    What came too late for this batch (grades, voids, rule changes, quarantines) counts for the next.
    """
    connection.execute(_LOCK_MEMBERS, {"batch": batch_id})
    connection.execute(_DISSOLVE, {"batch": batch_id, "reason": reason})
    returned = sorted(connection.execute(_BACK_TO_READY, {"batch": batch_id}).scalars())
    connection.execute(_LET_GO, {"batch": batch_id})
    gates.evaluate(connection, returned)


def _judge(connection: Connection, batch_id: int, record: Record) -> None:
    judgements = record.judgements
    connection.execute(
        _JUDGE_MEMBERS,
        {
            "batch": batch_id,
            "ids": list(judgements),
            "verdicts": [judgement.verdict for judgement in judgements.values()],
            "reasons": [judgement.reason for judgement in judgements.values()],
        },
    )
    connection.execute(_REJECTED, {"batch": batch_id})


def _end(connection: Connection, batch_id: int, state: str, outcome: str, record: Record) -> None:
    judgements = record.judgements.values()
    trainable = sum(not judgement.reason.startswith("untrainable:") for judgement in judgements)
    ended = connection.execute(
        _END_BATCH,
        {
            "batch": batch_id, "state": state, "outcome": outcome, "tokens": record.policy_tokens,
            "trainable": trainable, "metrics": json.dumps(dict(record.metrics)),
        },
    ).one_or_none()  # fmt: skip
    if ended is None:
        raise LeaseLost(f"Batch {batch_id} has ended already")
