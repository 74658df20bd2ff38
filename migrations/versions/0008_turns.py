"""What single turns of a batch earned and were expected to earn."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Apply it."""
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.create_table(
        "batch_turns",
        sa.Column("batch_id", sa.BigInteger(), nullable=False),
        sa.Column("rollout_id", sa.BigInteger(), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=False),
        sa.Column("baseline", sa.Double(), nullable=True),
        sa.Column("advantage", sa.Double(), nullable=True),
        sa.Column("grade_ids", postgresql.ARRAY(sa.BigInteger()), nullable=False),
        sa.Column("note", sa.Text(), server_default="", nullable=False),
        sa.CheckConstraint("(baseline IS NULL) = (advantage IS NULL)", name=op.f("ck_batch_turns_taught")),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_batch_turns_batch_id")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_batch_turns_rollout_id")),
        sa.PrimaryKeyConstraint("batch_id", "rollout_id", "turn", name=op.f("pk_batch_turns")),
    )
    op.create_index("ix_batch_turns_rollout_id", "batch_turns", ["rollout_id"])
