"""The state of `baseline: auto`, and every candidate's error on every batch."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Apply it."""
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.add_column("batches", sa.Column("candidate_errors", postgresql.JSONB(), nullable=True))
    op.create_table(
        "baseline_choices",
        sa.Column("policy_id", sa.BigInteger(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("document", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_baseline_choices_policy_id")),
        sa.PrimaryKeyConstraint("policy_id", name=op.f("pk_baseline_choices")),
    )
