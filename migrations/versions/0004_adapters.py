"""Pins, removed files, held promotion, the record of pointers' moves, verdicts of promotion gates."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

# Whoever moves a pointer, in whatever statement: the move is recorded and every process told of it.
_NOTE_MOVES = """
CREATE FUNCTION note_pointer_moves_v1() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    why text := coalesce(nullif(current_setting('yoro.reason', true), ''), 'step');
BEGIN
    IF OLD.head_version <> NEW.head_version THEN
        INSERT INTO pointer_moves (policy_id, pointer, from_version, to_version, reason)
        VALUES (NEW.policy_id, 'latest', OLD.head_version, NEW.head_version, why);
    END IF;
    IF OLD.promoted_version <> NEW.promoted_version THEN
        INSERT INTO pointer_moves (policy_id, pointer, from_version, to_version, reason)
        VALUES (NEW.policy_id, 'promoted', OLD.promoted_version, NEW.promoted_version, why);
    END IF;
    PERFORM pg_notify('yoro_versions', '');
    RETURN NULL;
END $$
"""

_TELL_OF_VERSIONS = """
CREATE FUNCTION tell_of_versions_v1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('yoro_versions', '');
    RETURN NULL;
END $$
"""

_TRIGGERS = (
    """
    CREATE TRIGGER note_pointer_moves AFTER UPDATE OF head_version, promoted_version ON lineages
    FOR EACH ROW WHEN (OLD.head_version <> NEW.head_version OR OLD.promoted_version <> NEW.promoted_version)
    EXECUTE FUNCTION note_pointer_moves_v1()
    """,
    """
    CREATE TRIGGER tell_of_versions AFTER UPDATE ON policy_versions
    FOR EACH STATEMENT EXECUTE FUNCTION tell_of_versions_v1()
    """,
)


def upgrade() -> None:
    """Apply it."""
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.add_column("lineages", _flag("promotion_held"))
    op.add_column("policy_versions", _flag("pinned"))
    op.add_column("policy_versions", sa.Column("files_removed_at", sa.DateTime(timezone=True), nullable=True))
    _create_pointer_moves()
    _create_promotion_checks()
    for statement in (_NOTE_MOVES, _TELL_OF_VERSIONS, *_TRIGGERS):
        op.execute(statement)


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), server_default=sa.text("false"), nullable=False)


def _create_pointer_moves() -> None:
    op.create_table(
        "pointer_moves",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("policy_id", sa.BigInteger(), nullable=False),
        sa.Column("pointer", sa.Text(), nullable=False),
        sa.Column("from_version", sa.Integer(), nullable=False),
        sa.Column("to_version", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column(
            "moved_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.CheckConstraint("pointer IN ('latest', 'promoted')", name=op.f("ck_pointer_moves_pointer")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_pointer_moves_policy_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pointer_moves")),
    )
    op.create_index("ix_pointer_moves_policy_id", "pointer_moves", ["policy_id", "id"])


def _create_promotion_checks() -> None:
    op.create_table(
        "promotion_checks",
        sa.Column("policy_id", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column(
            "started_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("attempts", sa.Integer(), server_default="1", nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("passed", sa.Boolean(), nullable=True),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("metrics", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_promotion_checks_policy_id")),
        sa.PrimaryKeyConstraint("policy_id", "version", name=op.f("pk_promotion_checks")),
    )
