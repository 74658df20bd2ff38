"""Kafka: dead letters with their outbox, and the lag that consumers report."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Apply it."""
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.create_table(
        "dead_letters",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("partition", sa.Integer(), nullable=False),
        sa.Column("message_offset", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("policy_id", sa.BigInteger(), nullable=True),
        sa.Column("trace_id", sa.Text(), nullable=True),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("kept", sa.Text(), nullable=False),
        sa.Column("message_key", sa.LargeBinary(), nullable=True),
        sa.Column("value", sa.LargeBinary(), nullable=True),
        sa.Column("headers", postgresql.JSONB(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("produced_at", sa.DateTime(timezone=True), nullable=True),
        _now("created_at"),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        _now("due_at", nullable=True),
        sa.Column("last_error", sa.Text(), server_default="", nullable=False),
        sa.Column("replayed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("kept IN ('whole', 'masked', 'hash')", name=op.f("ck_dead_letters_kept")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_dead_letters_policy_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dead_letters")),
        sa.UniqueConstraint(
            "topic", "partition", "message_offset", "digest",
            name=op.f("uq_dead_letters_topic_partition_message_offset_digest"),
        ),
    )  # fmt: skip
    _create_indexes()
    op.create_table(
        "consumer_lags",
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("partition", sa.Integer(), nullable=False),
        sa.Column("consumer", sa.Text(), nullable=False),
        sa.Column("lag", sa.BigInteger(), nullable=False),
        sa.Column("oldest_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("limit_seconds", sa.Double(), nullable=False),
        sa.Column("reported_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("topic", "partition", name=op.f("pk_consumer_lags")),
    )


def _create_indexes() -> None:
    op.create_index(
        "ix_dead_letters_due", "dead_letters", ["due_at"], postgresql_where=sa.text("due_at IS NOT NULL")
    )
    op.create_index("ix_dead_letters_created_at", "dead_letters", ["created_at"])
    op.create_index(
        "ix_dead_letters_open", "dead_letters", ["policy_id", "created_at"],
        postgresql_where=sa.text("replayed_at IS NULL"),
    )  # fmt: skip
    op.create_index(
        "ix_dead_letters_trace", "dead_letters", ["policy_id", "trace_id"],
        postgresql_where=sa.text("trace_id IS NOT NULL"),
    )  # fmt: skip


def _now(name: str, *, nullable: bool = False) -> "sa.Column[object]":
    return sa.Column(name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=nullable)
