"""Why a policy is paused or its settings changed by themselves, and from which batch on guards look."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Apply it."""
    op.execute("SET LOCAL lock_timeout = '4s'")
    for table, column in (
        ("policies", "paused_code"), ("policies", "paused_reason"), ("settings_revisions", "reason"),
    ):  # fmt: skip
        op.add_column(table, sa.Column(column, sa.Text(), server_default="", nullable=False))
    op.add_column(
        "policies", sa.Column("guards_from_batch", sa.Integer(), server_default="1", nullable=False)
    )
