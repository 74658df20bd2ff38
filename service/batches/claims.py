"""Claiming a batch: the trainer's next work, everything that fixes its gradient, and counted deaths.

Invariants: only the lease's holder claims; what is fixed at the first claim (L̄) stays for every later
one, so that a repeated step is the same step.
"""

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, text

from service.batches import counts, outcomes, trust
from service.batches.leases import Head, Lease, hold
from service.database.documents import read_document
from service.database.engine import transaction
from service.policies import PolicySettings

TOKENS_WINDOW = 16
"""Committed steps that L̄ is averaged over."""

_NEXT = text("""
SELECT b.id, b.number, b.size, b.claimed_token, b.attempts, b.failures, b.deaths, b.tokens_per_rollout,
       b.parameters, p.name AS policy, s.document
FROM batches b
JOIN policies p ON p.id = b.policy_id
JOIN settings_revisions s ON s.policy_id = b.policy_id AND s.revision = b.settings_revision
WHERE b.policy_id = :policy AND b.state = 'ready' AND NOT p.paused
ORDER BY b.number LIMIT 1 FOR UPDATE OF b
""")

_MEMBERS = text("""
SELECT m.rollout_id, m.reward, m.advantage, r.version, r.depth, d.normalised,
       r.erased_at IS NOT NULL AS erased,
       (SELECT json_object_agg(t.turn, t.advantage) FROM batch_turns t
        WHERE t.batch_id = m.batch_id AND t.rollout_id = m.rollout_id AND t.advantage IS NOT NULL) AS turns
FROM batch_members m
JOIN rollouts r ON r.id = m.rollout_id
LEFT JOIN rollout_documents d ON d.rollout_id = m.rollout_id
WHERE m.batch_id = :batch AND m.live ORDER BY m.position
""")

_TOKENS = text("""
SELECT sum(policy_tokens)::float8 / nullif(sum(trainable), 0) FROM (
    SELECT policy_tokens, trainable FROM batches
    WHERE policy_id = :policy AND state = 'trained' ORDER BY number DESC LIMIT :window) AS last
""")

_FOLDERS = text("""
SELECT version, folder, manifest_sha256 FROM policy_versions
WHERE policy_id = :policy AND version = ANY(:versions) AND files_removed_at IS NULL
""")

_TAKE = text("""
UPDATE batches SET attempts = attempts + 1, claimed_token = :token, deaths = :deaths,
    tokens_per_rollout = :tokens
WHERE id = :batch RETURNING attempts
""")


@dataclass(frozen=True, slots=True)
class ClaimedMember:
    """One rollout of a claimed batch, with its document."""

    rollout_id: int
    reward: float
    advantage: float
    version: int
    depth: int
    document: dict[str, Any]
    turns: dict[int, float] = field(default_factory=dict)
    """r_it − b_it of its graded turns, by message index."""


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """A batch as it is to be trained, on top of `head`."""

    id: int
    number: int
    policy: str
    size: int
    attempt: int
    failures: int
    deaths: int
    tokens_per_rollout: float
    settings: PolicySettings
    head: Head
    members: tuple[ClaimedMember, ...]
    folders: dict[int, str | None]
    """Folder in the adapter store by version: the head's and those that sampled members; not those whose
    files retention has removed."""
    manifests: dict[int, str | None] = field(default_factory=dict)
    """sha256 of their manifests, by which a folder swapped for another is found."""
    figures: dict[str, float] = field(default_factory=dict)
    """What is known of the batch before it is trained, by the names of the step's metrics."""


def claim_batch(engine: Engine, lease: Lease) -> ClaimedBatch | None:
    """Claim the policy's next ready batch; None when there is none. Raises LeaseLost.

    A batch of which a member was erased or went stale, or that rests on a grader now in quarantine, is
    dissolved instead, and the next one is tried.
    """
    with transaction(engine) as connection:
        head = hold(connection, lease)
        while (batch := connection.execute(_NEXT, {"policy": lease.policy_id}).one_or_none()) is not None:
            settings = PolicySettings.model_validate(batch.document)
            members = connection.execute(_MEMBERS, {"batch": batch.id}).all()
            least = head.depth - settings.batching.max_staleness
            if any(member.erased for member in members):
                outcomes.dissolve(connection, batch.id, "member_erased")
            elif any(member.depth < least for member in members):
                outcomes.dissolve(connection, batch.id, "member_stale")
            elif trust.rests_on_quarantined(connection, batch.id):  # imposed while it was claimed
                outcomes.dissolve(connection, batch.id, "grader_quarantined")
            else:
                return _claimed(connection, lease, head, batch=batch, settings=settings, members=members)
    return None


def _claimed(
    connection: Connection,
    lease: Lease,
    head: Head,
    *,
    batch: Any,
    settings: PolicySettings,
    members: Any,
) -> ClaimedBatch:
    # A token left on the batch that is not mine: its holder neither finished nor reported a failure.
    died = batch.claimed_token is not None and batch.claimed_token != lease.token
    deaths = batch.deaths + int(died)
    tokens = batch.tokens_per_rollout or _mean_tokens(connection, lease.policy_id, settings)
    attempt = connection.execute(
        _TAKE, {"batch": batch.id, "token": lease.token, "deaths": deaths, "tokens": tokens}
    ).scalar_one()
    claimed = tuple(_member(row) for row in members)
    versions = sorted({head.version}.union(*(_versions(member) for member in claimed)))
    stored = connection.execute(_FOLDERS, {"policy": lease.policy_id, "versions": versions}).all()
    return ClaimedBatch(
        id=batch.id, number=batch.number, policy=batch.policy, size=batch.size, attempt=attempt,
        failures=batch.failures, deaths=deaths, tokens_per_rollout=tokens, settings=settings, head=head,
        members=claimed,
        folders={row.version: row.folder for row in stored},
        manifests={row.version: row.manifest_sha256 for row in stored},
        figures=_figures(connection, lease.policy_id, head, batch=batch, settings=settings, members=members),
    )  # fmt: skip


def _figures(
    connection: Connection, policy_id: int, head: Head, *, batch: Any, settings: PolicySettings, members: Any
) -> dict[str, float]:
    """Return how stale members are, how many others have become too stale, what baselines rest on."""
    ages = [head.depth - member.depth for member in members]
    least = head.depth - settings.batching.max_staleness
    dropped = sum(
        count.amount
        for count in counts.read(connection, policy_id)
        if count.state == "ready" and count.depth < least
    )
    known = ("n_eff_p10", "fallback_frac")
    return {
        "staleness/mean": sum(ages) / max(1, len(ages)),
        "staleness/max": float(max(ages, default=0)),
        "staleness/dropped": float(dropped),
        "n_versions": float(len({member.version for member in members})),
        **{f"baseline/{name}": batch.parameters[name] for name in known if name in batch.parameters},
    }


def _mean_tokens(connection: Connection, policy_id: int, settings: PolicySettings) -> float:
    measured = connection.execute(_TOKENS, {"policy": policy_id, "window": TOKENS_WINDOW}).scalar_one()
    return float(measured or settings.objective.expected_tokens)


def _member(row: Any) -> ClaimedMember:
    document = read_document(row.normalised)
    turns = {int(turn): advantage for turn, advantage in (row.turns or {}).items()}
    return ClaimedMember(row.rollout_id, row.reward, row.advantage, row.version, row.depth, document, turns)


def _versions(member: ClaimedMember) -> set[int]:
    """Return the versions that sampled a member: its own (the oldest) and those of its calls."""
    called = {call.get("policy_version", member.version) for call in member.document.get("calls", ())}
    return called | {member.version}
