"""Rates of keys, quotas of policies, retention of raw documents."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Apply it."""
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.add_column("api_keys", sa.Column("rate_per_second", sa.Double(), nullable=True))
    op.create_table(
        "policy_usage",
        sa.Column("policy_id", sa.BigInteger(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("traces", sa.BigInteger(), nullable=False),
        sa.Column("grades", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_policy_usage_policy_id")),
        sa.PrimaryKeyConstraint("policy_id", "day", name=op.f("pk_policy_usage")),
    )
    _date_documents()
    _compress_texts_of_grades()


def _compress_texts_of_grades() -> None:
    """Take lz4 where this Postgres was built with it: a third of pglz's time. Documents come as zstd."""
    known = op.get_bind().execute(
        sa.text("SELECT enumvals FROM pg_settings WHERE name = 'default_toast_compression'")
    )
    if "lz4" in known.scalar_one():
        for column in ("criteria", "comment"):
            op.execute(f"ALTER TABLE grades ALTER COLUMN {column} SET COMPRESSION lz4")


def _date_documents() -> None:
    """Let retention find old documents without the hot table: the row carries its policy and its time."""
    op.add_column("rollout_documents", sa.Column("policy_id", sa.BigInteger(), nullable=True))
    op.add_column("rollout_documents", sa.Column("received_at", sa.DateTime(timezone=True), nullable=True))
    op.execute("""
        UPDATE rollout_documents d
        SET policy_id = r.policy_id, received_at = coalesce(r.received_at, r.seen_at)
        FROM rollouts r WHERE r.id = d.rollout_id
    """)
    op.alter_column("rollout_documents", "policy_id", nullable=False)
    op.alter_column("rollout_documents", "received_at", nullable=False)
    op.alter_column("rollout_documents", "raw", nullable=True)
    op.create_index(
        "ix_rollout_documents_raw", "rollout_documents", ["policy_id", "received_at", "rollout_id"],
        postgresql_where=sa.text("raw IS NOT NULL"),
    )  # fmt: skip
