"""Every table, typed; Alembic compares the database with this module.

Hot rows (`rollouts`, `grades`, `batch_members`) are narrow; documents lie apart and never change.
Invariants that the database itself keeps: one row a (policy, trace_id); one live batch membership
a rollout; one task a batch; one version a batch; versions numbered once; states from a fixed set.
"""

from datetime import date, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Date,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

ROLLOUT_STATES = ("waiting_reward", "ready", "batched", "trained", "excluded")
BATCH_STATES = ("ready", "trained", "no_step", "dissolved")


class Table(DeclarativeBase):
    """Base of all tables; constraint names are derived, so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
        list[str]: ARRAY(Text),
        list[int]: ARRAY(BigInteger),
        bytes: LargeBinary,
        str: Text,
        float: Double,
        int: BigInteger,
    }


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


class Secret(Table):
    """Keys of this installation, made at the first migration (`fingerprint`: HMAC of trace documents)."""

    __tablename__ = "secrets"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[bytes]


class ApiKey(Table):
    """A bearer key: only its SHA-256 is kept (the key has 256 random bits)."""

    __tablename__ = "api_keys"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    name: Mapped[str]
    prefix: Mapped[str]
    digest: Mapped[bytes] = mapped_column(unique=True)
    roles: Mapped[list[str]]
    policies: Mapped[list[str] | None]
    """Names of the policies it may touch; null: all."""
    rate_per_second: Mapped[float | None]
    """Documents a second that each api process takes from it; null: the server's default."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Policy(Table):
    """A named model under training."""

    __tablename__ = "policies"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    settings_revision: Mapped[int] = mapped_column(Integer, server_default="1")
    paused: Mapped[bool] = mapped_column(server_default=text("false"))
    paused_code: Mapped[str] = mapped_column(server_default="")
    """Which guard paused it (service/batches/guards.py); empty: a person, or nobody."""
    paused_reason: Mapped[str] = mapped_column(server_default="")
    guards_from_batch: Mapped[int] = mapped_column(Integer, server_default="1")
    """Guards look at batches from this number on: what a person has seen and resumed counts no more."""
    gate_epoch: Mapped[int] = mapped_column(Integer, server_default="1")
    """Raised by whatever changes what a grade or rollout counts for: rule, quarantine, rewind."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class SettingsRevision(Table):
    """One revision of a policy's settings document."""

    __tablename__ = "settings_revisions"
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    revision: Mapped[int] = mapped_column(Integer, primary_key=True)
    document: Mapped[dict[str, Any]]
    reason: Mapped[str] = mapped_column(server_default="")
    """Why a guard made it; empty: a person did."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Lineage(Table):
    """A policy's chain of versions and its lease: one row that claim, heartbeat, rewind, commit lock."""

    __tablename__ = "lineages"
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    head_version: Mapped[int] = mapped_column(Integer, server_default="0")
    head_depth: Mapped[int] = mapped_column(Integer, server_default="0")
    promoted_version: Mapped[int] = mapped_column(Integer, server_default="0")
    promotion_held: Mapped[bool] = mapped_column(server_default=text("false"))
    """`promoted` was rolled back alone: no version is promoted by itself until somebody promotes one."""
    next_version: Mapped[int] = mapped_column(Integer, server_default="1")
    """Never used before, never reused after a rewind."""
    next_batch: Mapped[int] = mapped_column(Integer, server_default="1")
    fencing_token: Mapped[int] = mapped_column(server_default="0")
    holder: Mapped[str | None]
    expires_at: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime | None]
    activity: Mapped[str] = mapped_column(server_default="idle")
    """What the holder says it is doing: idle, loading, training, publishing."""


class Rollout(Table):
    """The registry: one row a (policy, trace_id), made by whichever of trace and grade comes first.

    `state` is null while only grades have come. `arrival` is a number drawn by the delivery that
    brought the trace: it tells the accepted delivery from its duplicates in one statement.
    """

    __tablename__ = "rollouts"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    trace_id: Mapped[str]
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    arrival: Mapped[int | None]
    fingerprint: Mapped[bytes | None]
    canonicaliser: Mapped[int | None] = mapped_column(SmallInteger)
    received_at: Mapped[datetime | None]
    status: Mapped[str | None]
    task_key: Mapped[str | None]
    session_id: Mapped[str | None]
    version: Mapped[int | None] = mapped_column(Integer)
    depth: Mapped[int | None] = mapped_column(Integer)
    """Depth of the sampling version; fixed, as a version's depth never changes."""
    verdict: Mapped[str | None]
    verdict_reasons: Mapped[list[str] | None]
    state: Mapped[str | None]
    reason: Mapped[str] = mapped_column(server_default="")
    due_at: Mapped[datetime | None]
    """When waiting or settling ends without any further grade."""
    reward: Mapped[float | None]
    reward_revision: Mapped[int | None] = mapped_column(Integer)
    """Settings revision whose rule made the reward."""
    reward_grades: Mapped[list[int] | None]
    rewarded_at: Mapped[datetime | None]
    gate_epoch: Mapped[int | None] = mapped_column(Integer)
    """Epoch of its policy under which it was last evaluated; null: no grade has come yet."""
    ready_at: Mapped[datetime | None]
    late_grades: Mapped[int] = mapped_column(Integer, server_default="0")
    erased_at: Mapped[datetime | None]

    __table_args__ = (
        UniqueConstraint("policy_id", "trace_id"),
        CheckConstraint(_one_of("state", ROLLOUT_STATES), name="state"),
        CheckConstraint("(arrival IS NULL) = (state IS NULL)", name="state_iff_arrived"),
        CheckConstraint("reward >= 0 AND reward <= 1", name="reward_range"),
        CheckConstraint("state <> 'ready' OR reward IS NOT NULL", name="ready_has_reward"),
        Index(
            "ix_rollouts_ready",
            "policy_id",
            "depth",
            "ready_at",
            "id",
            postgresql_where=text("state = 'ready'"),
        ),
        Index("ix_rollouts_due", "due_at", postgresql_where=text("due_at IS NOT NULL")),
        Index(
            "ix_rollouts_history",
            "policy_id",
            "rewarded_at",
            "id",
            postgresql_where=text("reward IS NOT NULL AND arrival IS NOT NULL AND erased_at IS NULL"),
        ),
        Index("ix_rollouts_state", "policy_id", "state", "received_at", "id"),
        Index("ix_rollouts_awaited", "policy_id", "seen_at", postgresql_where=text("state IS NULL")),
        Index(
            "ix_rollouts_epoch",
            "policy_id",
            "gate_epoch",
            postgresql_where=text(
                "gate_epoch IS NOT NULL AND state IN ('waiting_reward', 'ready', 'excluded')"
            ),
        ),
        {"postgresql_with": {"fillfactor": "80"}},
    )


class RolloutDocument(Table):
    """What the agent sent and what we read from it; zstd; only retention touches it."""

    __tablename__ = "rollout_documents"
    rollout_id: Mapped[int] = mapped_column(ForeignKey("rollouts.id"), primary_key=True)
    policy_id: Mapped[int]
    received_at: Mapped[datetime]
    raw: Mapped[bytes | None]
    """As it came, after the policy's masks; null once the policy's retention has passed."""
    normalised: Mapped[bytes]

    __table_args__ = (
        Index(
            "ix_rollout_documents_raw", "policy_id", "received_at", "rollout_id",
            postgresql_where=text("raw IS NOT NULL"),
        ),
    )  # fmt: skip


class PolicyUsage(Table):
    """New documents of a policy in one UTC day, counted for its quotas."""

    __tablename__ = "policy_usage"
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    day: Mapped[date] = mapped_column(Date, primary_key=True)
    traces: Mapped[int]
    grades: Mapped[int]


class RolloutFeatures(Table):
    """What a baseline may see of a rollout: known before its first action (service/baselines)."""

    __tablename__ = "rollout_features"
    rollout_id: Mapped[int] = mapped_column(ForeignKey("rollouts.id"), primary_key=True)
    features: Mapped[bytes]
    """zstd JSON of TaskFeatures."""
    text_digest: Mapped[bytes]
    content_digest: Mapped[bytes]
    opening_digest: Mapped[bytes]
    prompt_digests: Mapped[bytes]
    """SHA-256 digests one after the other."""


class Embedding(Table):
    """Cache of sentence embeddings by the text's SHA-256 and the encoder's name."""

    __tablename__ = "embeddings"
    text_digest: Mapped[bytes] = mapped_column(primary_key=True)
    encoder: Mapped[str] = mapped_column(primary_key=True)
    vector: Mapped[bytes]
    """float32, little endian, unit norm."""


class Grade(Table):
    """Append-only: one revision of what a grader says. The current one is the greatest of its key.

    No reference to a trace: `rollout_id` is the registry row, which a grade may make itself.
    """

    __tablename__ = "grades"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    rollout_id: Mapped[int] = mapped_column(ForeignKey("rollouts.id"))
    grader: Mapped[str]
    name: Mapped[str]
    turn: Mapped[int | None] = mapped_column(Integer)
    value: Mapped[float | None]
    """Mapped to [0, 1]; null: retracted."""
    sent_value: Mapped[float | None]
    criteria: Mapped[bytes | None]
    comment: Mapped[bytes | None]
    grader_version: Mapped[str | None]
    graded_at: Mapped[datetime | None]
    received_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    current: Mapped[bool]

    __table_args__ = (
        CheckConstraint("value >= 0 AND value <= 1", name="value_range"),
        Index(
            "uq_grades_current",
            "rollout_id",
            "grader",
            "name",
            "turn",
            unique=True,
            postgresql_where=text("current"),
            postgresql_nulls_not_distinct=True,
        ),
        Index("ix_grades_rollout_id", "rollout_id"),
    )


class Batch(Table):
    """B rollouts of B different tasks, with their baselines, trained in one optimizer step."""

    __tablename__ = "batches"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    number: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(server_default="ready")
    outcome: Mapped[str] = mapped_column(server_default="")
    """Why there was no step, or why it was dissolved."""
    size: Mapped[int] = mapped_column(Integer)
    """B, the denominator; members that the trainer rejects stay in it."""
    settings_revision: Mapped[int] = mapped_column(Integer)
    estimator: Mapped[str]
    parameters: Mapped[dict[str, Any]]
    """Hyperparameters of the estimator, size of the window and its cut-off."""
    candidate_errors: Mapped[dict[str, Any] | None]
    """Mean squared advantage that each estimator would have had; null until it was computed."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    failures: Mapped[int] = mapped_column(Integer, server_default="0")
    deaths: Mapped[int] = mapped_column(Integer, server_default="0")
    claimed_token: Mapped[int | None]
    """Fencing token of the claim that is under way; left behind by a death."""
    diagnosis: Mapped[str] = mapped_column(server_default="")
    tokens_per_rollout: Mapped[float | None]
    """L̄, fixed at claim."""
    policy_tokens: Mapped[int | None]
    """Sampled tokens of its trainable members, gated out or not."""
    trainable: Mapped[int | None] = mapped_column(Integer)
    """Members that the trainer did not reject."""
    metrics: Mapped[dict[str, Any] | None]
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        UniqueConstraint("policy_id", "number"),
        CheckConstraint(_one_of("state", BATCH_STATES), name="state"),
        Index("ix_batches_ready", "policy_id", "number", postgresql_where=text("state = 'ready'")),
    )


class BaselineChoice(Table):
    """State of `baseline: auto` for the policy's next batch (service/baselines/selection.py)."""

    __tablename__ = "baseline_choices"
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    batch: Mapped[int] = mapped_column(Integer)
    """Number of the batch that advanced it last."""
    document: Mapped[dict[str, Any]]


class BatchMember(Table):
    """One rollout's place in a batch. `live` holds it; cleared when the batch ends without training it."""

    __tablename__ = "batch_members"
    batch_id: Mapped[int] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    rollout_id: Mapped[int] = mapped_column(ForeignKey("rollouts.id"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer)
    task_key: Mapped[str]
    live: Mapped[bool] = mapped_column(server_default=text("true"))
    reward: Mapped[float]
    baseline: Mapped[float]
    advantage: Mapped[float]
    neighbours: Mapped[list[Any]]
    """[[rollout id, weight], …], heaviest first; what is left out is in `neighbours_left_out`."""
    neighbours_left_out: Mapped[int] = mapped_column(Integer, server_default="0")
    verdict: Mapped[str | None]
    reason: Mapped[str] = mapped_column(server_default="")
    """Why the trainer rejected or gated it out."""

    __table_args__ = (
        UniqueConstraint("batch_id", "task_key"),
        Index("uq_batch_members_live", "rollout_id", unique=True, postgresql_where=text("live")),
    )


class BatchTurn(Table):
    """A graded message of a member, where `objective.turn_weight` was on when the batch was formed."""

    __tablename__ = "batch_turns"
    batch_id: Mapped[int] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    rollout_id: Mapped[int] = mapped_column(ForeignKey("rollouts.id"), primary_key=True)
    turn: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Index of the message."""
    reward: Mapped[float]
    baseline: Mapped[float | None]
    advantage: Mapped[float | None]
    """Null: it teaches nothing, and `note` says why."""
    grade_ids: Mapped[list[int]]
    note: Mapped[str] = mapped_column(server_default="")

    __table_args__ = (
        CheckConstraint("(baseline IS NULL) = (advantage IS NULL)", name="taught"),
        Index("ix_batch_turns_rollout_id", "rollout_id"),
    )


class PolicyVersion(Table):
    """An immutable adapter version. Version 0 is the base model and has no files."""

    __tablename__ = "policy_versions"
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    parent: Mapped[int | None] = mapped_column(Integer)
    depth: Mapped[int] = mapped_column(Integer)
    batch_id: Mapped[int | None] = mapped_column(ForeignKey("batches.id"), unique=True)
    fencing_token: Mapped[int]
    folder: Mapped[str | None]
    """Name of its folder in the adapter store; never used twice."""
    manifest: Mapped[dict[str, Any] | None]
    manifest_sha256: Mapped[str | None]
    adapter_sha256: Mapped[str | None]
    tainted: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))
    """Why it should not serve; empty: clean."""
    rewound: Mapped[bool] = mapped_column(server_default=text("false"))
    """The head was put back before it: what it sampled is `off_branch`."""
    pinned: Mapped[bool] = mapped_column(server_default=text("false"))
    """Somebody wants its files kept."""
    files_removed_at: Mapped[datetime | None]
    """When retention gave up its files; the row stays, and its number is never used again."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        ForeignKeyConstraint(
            ["policy_id", "parent"],
            ["policy_versions.policy_id", "policy_versions.version"],
            name="fk_policy_versions_parent",
        ),
        CheckConstraint("(version = 0) = (folder IS NULL)", name="folder_unless_base"),
        Index("ix_policy_versions_adapter_sha256", "policy_id", "adapter_sha256"),
    )


class PointerMove(Table):
    """One move of `latest` or `promoted`, written by a trigger, whoever made it."""

    __tablename__ = "pointer_moves"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    pointer: Mapped[str]
    from_version: Mapped[int] = mapped_column(Integer)
    to_version: Mapped[int] = mapped_column(Integer)
    reason: Mapped[str]
    """`step`, or who did what: `promote by ops-key`."""
    moved_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())

    __table_args__ = (
        CheckConstraint("pointer IN ('latest', 'promoted')", name="pointer"),
        Index("ix_pointer_moves_policy_id", "policy_id", "id"),
    )


class PromotionCheck(Table):
    """The verdict of a gated policy's gates and hook on one version."""

    __tablename__ = "promotion_checks"
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    started_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    attempts: Mapped[int] = mapped_column(Integer, server_default="1")
    finished_at: Mapped[datetime | None]
    passed: Mapped[bool | None]
    reason: Mapped[str] = mapped_column(server_default="")
    """What failed, in words; empty: everything passed."""
    metrics: Mapped[dict[str, Any] | None]
    """What the gates measured and what the hook answered."""


class GateCount(Table):
    """How many rollouts of a policy are in a state for a reason; with `gate_count_changes`, exact.

    Ready rollouts are counted by depth, since staleness is derived. Beside the states there are
    `waiting_for_trace`, `expired_grades`, `late_grades`, and `grader` (its name is the reason).
    """

    __tablename__ = "gate_counts"
    policy_id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(primary_key=True)
    reason: Mapped[str] = mapped_column(primary_key=True)
    depth: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Of ready rollouts; -1 otherwise."""
    amount: Mapped[int]
    last_at: Mapped[datetime | None]
    """When the newest grade of a grader came."""


class GateCountChange(Table):
    """What one statement changed of the counts, by triggers; folded in by the scheduler.

    Appended only, so that writers never wait for each other's counts.
    """

    __tablename__ = "gate_count_changes"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    policy_id: Mapped[int]
    state: Mapped[str]
    reason: Mapped[str]
    depth: Mapped[int] = mapped_column(Integer)
    amount: Mapped[int]
    last_at: Mapped[datetime | None]

    __table_args__ = (
        # emptied twice a second: dead rows must not pile up between vacuums
        {"postgresql_with": {"autovacuum_vacuum_scale_factor": "0", "autovacuum_vacuum_threshold": "2000"}},
    )


class Erasure(Table):
    """An erased trace: only a keyed hash of its id is left, by which it cannot come back."""

    __tablename__ = "erasures"
    policy_id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[bytes] = mapped_column(primary_key=True)
    erased_at: Mapped[datetime] = mapped_column(server_default=func.now())


class GraderQuarantine(Table):
    """A grader whose grades do not count, all of them or from a time on."""

    __tablename__ = "grader_quarantines"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    grader: Mapped[str]
    since: Mapped[datetime | None]
    """Compared with `graded_at`, or the receive time where that is missing; null: always."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    lifted_at: Mapped[datetime | None]

    __table_args__ = (
        Index(
            "uq_grader_quarantines_in_force", "policy_id", "grader", unique=True,
            postgresql_where=text("lifted_at IS NULL"),
        ),
    )  # fmt: skip


class Alert(Table):
    """Something a person should look at, from when it was first seen to when it was over."""

    __tablename__ = "alerts"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    code: Mapped[str]
    detail: Mapped[str]
    raised_at: Mapped[datetime] = mapped_column(server_default=func.now())
    cleared_at: Mapped[datetime | None]

    __table_args__ = (
        Index(
            "uq_alerts_raised", "policy_id", "code", unique=True,
            postgresql_where=text("cleared_at IS NULL"),
        ),
    )  # fmt: skip


class Webhook(Table):
    """Where somebody wants to hear of events."""

    __tablename__ = "webhooks"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    url: Mapped[str]
    events: Mapped[list[str]]
    secret: Mapped[str]
    """Signs deliveries; shown once."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class WebhookDelivery(Table):
    """The outbox: one event for one webhook, written in the transaction that made it happen."""

    __tablename__ = "webhook_deliveries"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    webhook_id: Mapped[int] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    event: Mapped[str]
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    due_at: Mapped[datetime | None] = mapped_column(server_default=func.now())
    """When to try next; null: delivered or given up."""
    delivered_at: Mapped[datetime | None]
    last_error: Mapped[str] = mapped_column(server_default="")

    __table_args__ = (
        Index("ix_webhook_deliveries_due", "due_at", postgresql_where=text("due_at IS NOT NULL")),
        Index("ix_webhook_deliveries_webhook_id", "webhook_id"),
    )


class DeadLetter(Table):
    """A Kafka message that could not be taken, and the outbox of the dead-letter topic.

    Coordinates alone would do to tell one message from another, were it not for topics that are deleted
    and made again: the digest of the value keeps a second life's messages from passing for the first's.
    """

    __tablename__ = "dead_letters"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    topic: Mapped[str]
    partition: Mapped[int] = mapped_column(Integer)
    message_offset: Mapped[int]
    digest: Mapped[bytes]
    """SHA-256 of the value as it came."""
    policy_id: Mapped[int | None] = mapped_column(ForeignKey("policies.id"))
    trace_id: Mapped[str | None]
    code: Mapped[str]
    detail: Mapped[str]
    kept: Mapped[str]
    """What is left of the message: `whole`, `masked` (the value, under the policy's masks) or `hash`."""
    message_key: Mapped[bytes | None]
    value: Mapped[bytes | None]
    headers: Mapped[list[Any]]
    """[[name, base64 or null], …]"""
    size: Mapped[int | None]
    """Bytes of the value as it came; null: a tombstone."""
    produced_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    due_at: Mapped[datetime | None] = mapped_column(server_default=func.now())
    """When to try the dead-letter topic next; null: it is there."""
    last_error: Mapped[str] = mapped_column(server_default="")
    replayed_at: Mapped[datetime | None]

    __table_args__ = (
        UniqueConstraint("topic", "partition", "message_offset", "digest"),
        CheckConstraint("kept IN ('whole', 'masked', 'hash')", name="kept"),
        Index("ix_dead_letters_due", "due_at", postgresql_where=text("due_at IS NOT NULL")),
        Index("ix_dead_letters_created_at", "created_at"),
        Index(
            "ix_dead_letters_open", "policy_id", "created_at", postgresql_where=text("replayed_at IS NULL")
        ),
        Index(
            "ix_dead_letters_trace", "policy_id", "trace_id", postgresql_where=text("trace_id IS NOT NULL")
        ),
    )


class ConsumerLag(Table):
    """What the consumer that owns a partition last said of it."""

    __tablename__ = "consumer_lags"
    topic: Mapped[str] = mapped_column(primary_key=True)
    partition: Mapped[int] = mapped_column(Integer, primary_key=True)
    consumer: Mapped[str]
    lag: Mapped[int]
    """Messages that are not durable yet."""
    oldest_at: Mapped[datetime | None]
    """When the oldest of them was produced; null: none is waiting."""
    limit_seconds: Mapped[float]
    """Age from which on the consumer itself is not ready."""
    reported_at: Mapped[datetime]
