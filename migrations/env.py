"""Run migrations on the connection handed over, or on YORO_DATABASE_URL."""

from alembic import context

from service.database import engine
from service.database.tables import Table
from service.settings import Settings


def _run(connection: object) -> None:
    context.configure(connection=connection, target_metadata=Table.metadata, compare_type=True)  # type: ignore[arg-type]
    with context.begin_transaction():
        context.run_migrations()


handed_over = context.config.attributes.get("connection")
if handed_over is not None:
    _run(handed_over)
else:
    with engine.transaction(engine.connect(Settings().database_url, name="migrate")) as own:
        _run(own)
