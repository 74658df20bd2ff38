"""Gate epochs, maintained counts, erasures, quarantines, alerts, webhooks."""

import os
from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

# The reason under which a rollout is counted: batch and version numbers would make one count each.
_COUNTED = """
CASE WHEN {row}.state = 'batched' THEN ''
     WHEN {row}.state = 'trained' AND {row}.erased_at IS NOT NULL THEN 'erased'
     WHEN {row}.state = 'trained' AND {row}.reason LIKE 'version %' THEN ''
     ELSE {row}.reason END,
CASE WHEN {row}.state = 'ready' THEN coalesce({row}.depth, -1) ELSE -1 END
"""

# Statement-level triggers with transition tables: one row of changes a statement and gate, however many
# rollouts it touched, and no shared row that writers would queue for.
_COUNT_ROLLOUTS = f"""
CREATE FUNCTION count_rollouts_v1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        -- a registration that raced with the erasure of its id: the writer's retry sees the tombstone
        IF EXISTS (SELECT FROM erasures e WHERE e.policy_id IN (SELECT policy_id FROM new_rows))
           AND EXISTS (SELECT FROM new_rows n JOIN erasures e ON e.policy_id = n.policy_id
                       AND e.digest = erasure_digest_v1(n.policy_id, n.trace_id)) THEN
            RAISE EXCEPTION 'this trace was erased' USING ERRCODE = 'serialization_failure';
        END IF;
        INSERT INTO gate_count_changes (policy_id, state, reason, depth, amount)
        SELECT n.policy_id, n.state, {_COUNTED.format(row="n")}, count(*)
        FROM new_rows n WHERE n.state IS NOT NULL GROUP BY 1, 2, 3, 4;
        RETURN NULL;
    END IF;
    INSERT INTO gate_count_changes (policy_id, state, reason, depth, amount)
    SELECT policy_id, c.state, c.reason, c.depth, sum(c.amount) FROM (
        -- every row is read once; what is left are a few groups
        SELECT r.policy_id, r.state, {_COUNTED.format(row="r")}, sum(sign), sum(sign * late_grades)
        FROM (SELECT policy_id, state, reason, depth, erased_at, late_grades, 1 AS sign FROM new_rows
              UNION ALL
              SELECT policy_id, state, reason, depth, erased_at, late_grades, -1 FROM old_rows) AS r
        WHERE r.state IS NOT NULL GROUP BY 1, 2, 3, 4
    ) AS moved (policy_id, state, reason, depth, amount, late)
    CROSS JOIN LATERAL (VALUES (state, reason, depth, amount), ('late_grades', '', -1, late))
        AS c (state, reason, depth, amount)
    GROUP BY 1, 2, 3, 4 HAVING sum(c.amount) <> 0;
    -- the trace of grades that waited for it has come
    IF EXISTS (SELECT FROM old_rows WHERE state IS NULL) THEN
        INSERT INTO gate_count_changes (policy_id, state, reason, depth, amount)
        SELECT n.policy_id, 'waiting_for_trace', '', -1, -count(*)
        FROM old_rows o JOIN new_rows n ON n.id = o.id JOIN grades g ON g.rollout_id = n.id AND g.current
        WHERE o.state IS NULL AND n.state IS NOT NULL GROUP BY 1;
    END IF;
    RETURN NULL;
END $$
"""  # noqa: S608 - our own expressions

_COUNT_GRADES = """
CREATE FUNCTION count_grades_v1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO gate_count_changes (policy_id, state, reason, depth, amount, last_at)
        SELECT policy_id, state, reason, -1, sum(amount), max(last_at) FROM (
            -- joined once, grouped once: what waits for its trace falls out of the same groups
            SELECT r.policy_id, n.grader, count(*) AS every, max(n.received_at) AS newest,
                   count(*) FILTER (WHERE r.state IS NULL AND n.current) AS waiting
            FROM new_rows n JOIN rollouts r ON r.id = n.rollout_id GROUP BY 1, 2) AS graded
        CROSS JOIN LATERAL (VALUES ('grader', grader, every, newest),
                                   ('waiting_for_trace', '', waiting, NULL))
            AS counted (state, reason, amount, last_at)
        WHERE amount > 0 GROUP BY 1, 2, 3;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO gate_count_changes (policy_id, state, reason, depth, amount)
        SELECT r.policy_id, 'waiting_for_trace', '', -1, sum(changed.amount) FROM (
            SELECT rollout_id, 1 AS amount FROM new_rows WHERE current
            UNION ALL SELECT rollout_id, -1 FROM old_rows WHERE current) AS changed
        JOIN rollouts r ON r.id = changed.rollout_id
        WHERE r.state IS NULL GROUP BY 1 HAVING sum(changed.amount) <> 0;
    ELSE
        INSERT INTO gate_count_changes (policy_id, state, reason, depth, amount)
        SELECT r.policy_id, 'waiting_for_trace', '', -1, -count(*)
        FROM old_rows o JOIN rollouts r ON r.id = o.rollout_id
        WHERE r.state IS NULL AND o.current GROUP BY 1;
    END IF;
    RETURN NULL;
END $$
"""

_ERASURE_DIGEST = """
CREATE FUNCTION erasure_digest_v1(policy bigint, trace text) RETURNS bytea LANGUAGE sql STABLE AS $$
    SELECT sha256((SELECT value FROM secrets WHERE name = 'erasure')
                  || convert_to(policy::text || ':' || trace, 'UTF8'))
$$
"""

# Events are written by the database itself, with what makes them true: no caller can forget one.
_ANNOUNCE_VERSIONS = """
CREATE FUNCTION announce_version_v1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhook_deliveries (webhook_id, event, payload)
    SELECT w.id, 'version.published', jsonb_build_object(
        'policy', p.name, 'version', NEW.version, 'parent', NEW.parent, 'depth', NEW.depth,
        'adapter_sha256', NEW.adapter_sha256, 'tainted', to_jsonb(NEW.tainted))
    FROM webhooks w JOIN policies p ON p.id = w.policy_id
    WHERE w.policy_id = NEW.policy_id AND 'version.published' = ANY(w.events);
    RETURN NULL;
END $$
"""

_ANNOUNCE_PROMOTIONS = """
CREATE FUNCTION announce_promotion_v1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhook_deliveries (webhook_id, event, payload)
    SELECT w.id, 'version.promoted', jsonb_build_object(
        'policy', p.name, 'version', NEW.promoted_version, 'before', OLD.promoted_version)
    FROM webhooks w JOIN policies p ON p.id = w.policy_id
    WHERE w.policy_id = NEW.policy_id AND 'version.promoted' = ANY(w.events);
    RETURN NULL;
END $$
"""

_ANNOUNCE_ALERTS = """
CREATE FUNCTION announce_alert_v1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhook_deliveries (webhook_id, event, payload)
    SELECT w.id, 'alert.raised', jsonb_build_object(
        'policy', p.name, 'code', NEW.code, 'detail', NEW.detail, 'raised_at', NEW.raised_at)
    FROM webhooks w JOIN policies p ON p.id = w.policy_id
    WHERE w.policy_id = NEW.policy_id AND 'alert.raised' = ANY(w.events);
    RETURN NULL;
END $$
"""

_TRIGGERS = (
    "CREATE TRIGGER count_inserted AFTER INSERT ON rollouts REFERENCING NEW TABLE AS new_rows"
    " FOR EACH STATEMENT EXECUTE FUNCTION count_rollouts_v1()",
    "CREATE TRIGGER count_updated AFTER UPDATE ON rollouts"
    " REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows"
    " FOR EACH STATEMENT EXECUTE FUNCTION count_rollouts_v1()",
    "CREATE TRIGGER count_inserted AFTER INSERT ON grades REFERENCING NEW TABLE AS new_rows"
    " FOR EACH STATEMENT EXECUTE FUNCTION count_grades_v1()",
    "CREATE TRIGGER count_updated AFTER UPDATE ON grades"
    " REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows"
    " FOR EACH STATEMENT EXECUTE FUNCTION count_grades_v1()",
    "CREATE TRIGGER count_deleted AFTER DELETE ON grades REFERENCING OLD TABLE AS old_rows"
    " FOR EACH STATEMENT EXECUTE FUNCTION count_grades_v1()",
    "CREATE TRIGGER announce AFTER INSERT ON policy_versions FOR EACH ROW WHEN (NEW.version > 0)"
    " EXECUTE FUNCTION announce_version_v1()",
    "CREATE TRIGGER announce AFTER UPDATE OF promoted_version ON lineages FOR EACH ROW"
    " WHEN (NEW.promoted_version <> OLD.promoted_version) EXECUTE FUNCTION announce_promotion_v1()",
    "CREATE TRIGGER announce AFTER INSERT ON alerts FOR EACH ROW EXECUTE FUNCTION announce_alert_v1()",
)


def upgrade() -> None:
    """Apply it."""
    op.execute("SET LOCAL lock_timeout = '4s'")
    _add_epochs()
    _create_tables()
    _create_webhooks()
    for statement in (
        _ERASURE_DIGEST, _COUNT_ROLLOUTS, _COUNT_GRADES, _ANNOUNCE_VERSIONS, _ANNOUNCE_PROMOTIONS,
        _ANNOUNCE_ALERTS, *_TRIGGERS,
    ):  # fmt: skip
        op.execute(statement)
    _count_what_is_there()
    op.execute(
        sa.text("INSERT INTO secrets (name, value) VALUES ('erasure', :key)").bindparams(key=os.urandom(32))
    )


def _add_epochs() -> None:
    op.add_column("policies", sa.Column("gate_epoch", sa.Integer(), server_default="1", nullable=False))
    op.add_column("rollouts", sa.Column("gate_epoch", sa.Integer(), nullable=True))
    op.add_column(
        "policy_versions",
        sa.Column("rewound", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )
    op.execute("""
        UPDATE rollouts SET gate_epoch = 0
        WHERE state IN ('waiting_reward', 'ready', 'excluded') AND reason <> 'no_grade'
    """)
    op.drop_index("ix_rollouts_ready", "rollouts")
    op.drop_index("ix_rollouts_state", "rollouts")
    op.create_index(
        "ix_rollouts_ready", "rollouts", ["policy_id", "depth", "ready_at", "id"],
        postgresql_where=sa.text("state = 'ready'"),
    )  # fmt: skip
    op.create_index("ix_rollouts_state", "rollouts", ["policy_id", "state", "received_at", "id"])
    op.create_index(
        "ix_rollouts_awaited", "rollouts", ["policy_id", "seen_at"],
        postgresql_where=sa.text("state IS NULL"),
    )  # fmt: skip
    op.create_index(
        "ix_rollouts_epoch", "rollouts", ["policy_id", "gate_epoch"],
        postgresql_where=sa.text(
            "gate_epoch IS NOT NULL AND state IN ('waiting_reward', 'ready', 'excluded')"
        ),
    )  # fmt: skip


def _count_columns() -> tuple[sa.Column[object], ...]:
    return (
        sa.Column("policy_id", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=True),
    )


def _created(name: str = "created_at") -> "sa.Column[object]":
    return sa.Column(name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)


def _id() -> "sa.Column[object]":
    return sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False)


def _create_tables() -> None:
    op.create_table(
        "gate_counts",
        *_count_columns(),
        sa.PrimaryKeyConstraint("policy_id", "state", "reason", "depth", name=op.f("pk_gate_counts")),
    )
    op.create_table(
        "gate_count_changes",
        _id(),
        *_count_columns(),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gate_count_changes")),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0", "autovacuum_vacuum_threshold": "2000"},
    )
    op.create_table(
        "erasures",
        sa.Column("policy_id", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        _created("erased_at"),
        sa.PrimaryKeyConstraint("policy_id", "digest", name=op.f("pk_erasures")),
    )
    op.create_table(
        "grader_quarantines",
        _id(),
        sa.Column("policy_id", sa.BigInteger(), nullable=False),
        sa.Column("grader", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=True),
        _created(),
        sa.Column("lifted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_grader_quarantines_policy_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_grader_quarantines")),
    )
    op.create_index(
        "uq_grader_quarantines_in_force", "grader_quarantines", ["policy_id", "grader"], unique=True,
        postgresql_where=sa.text("lifted_at IS NULL"),
    )  # fmt: skip
    op.create_table(
        "alerts",
        _id(),
        sa.Column("policy_id", sa.BigInteger(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        _created("raised_at"),
        sa.Column("cleared_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_alerts_policy_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
    )
    op.create_index(
        "uq_alerts_raised", "alerts", ["policy_id", "code"], unique=True,
        postgresql_where=sa.text("cleared_at IS NULL"),
    )  # fmt: skip


def _create_webhooks() -> None:
    op.create_table(
        "webhooks",
        _id(),
        sa.Column("policy_id", sa.BigInteger(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        _created(),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_webhooks_policy_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_table(
        "webhook_deliveries",
        _id(),
        sa.Column("webhook_id", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("payload", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        _created(),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=True),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_error", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name=op.f("fk_webhook_deliveries_webhook_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
    )
    op.create_index(
        "ix_webhook_deliveries_due", "webhook_deliveries", ["due_at"],
        postgresql_where=sa.text("due_at IS NOT NULL"),
    )  # fmt: skip
    op.create_index("ix_webhook_deliveries_webhook_id", "webhook_deliveries", ["webhook_id"])


def _count_what_is_there() -> None:
    op.execute(f"""
        INSERT INTO gate_counts (policy_id, state, reason, depth, amount)
        SELECT r.policy_id, r.state, {_COUNTED.format(row="r")}, count(*)
        FROM rollouts r WHERE r.state IS NOT NULL GROUP BY 1, 2, 3, 4
        UNION ALL SELECT policy_id, 'late_grades', '', -1, sum(late_grades) FROM rollouts
        WHERE late_grades > 0 GROUP BY 1
        UNION ALL SELECT r.policy_id, 'waiting_for_trace', '', -1, count(*)
        FROM rollouts r JOIN grades g ON g.rollout_id = r.id AND g.current WHERE r.state IS NULL GROUP BY 1
    """)  # noqa: S608 - our own expressions
    op.execute("""
        INSERT INTO gate_counts (policy_id, state, reason, depth, amount, last_at)
        SELECT r.policy_id, 'grader', g.grader, -1, count(*), max(g.received_at)
        FROM grades g JOIN rollouts r ON r.id = g.rollout_id GROUP BY 1, 3
    """)
