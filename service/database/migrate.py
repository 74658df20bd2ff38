"""Bring the schema to head, one process at a time.

Knows nothing of what the tables mean.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, text

from service.database.engine import transaction

SCRIPTS = Path(__file__).resolve().parents[2] / "migrations"
LOCK = 0x796F726F  # "yoro": two processes that start together must not both migrate


def upgrade(engine: Engine) -> None:
    """Apply all missing migrations in one transaction under an advisory lock."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    with transaction(engine) as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def is_current(engine: Engine) -> bool:
    """Tell whether the database is at the newest migration."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    heads = set(ScriptDirectory.from_config(config).get_heads())
    with transaction(engine) as connection:
        return set(MigrationContext.configure(connection).get_current_heads()) == heads
