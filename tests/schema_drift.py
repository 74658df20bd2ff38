"""`make check`: compare a freshly migrated database with tables.py, as `alembic check` does."""

import sys
import tempfile
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from service.database import engine as database
from service.database import migrate
from service.database.embedded import EmbeddedPostgres
from service.database.tables import Table


def main() -> int:
    """Return 1 and print the differences if there are any."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder) / "data", options=("-c", "fsync=off"))
        try:
            engine = database.connect(server.url(), name="schema drift")
            migrate.upgrade(engine)
            with database.transaction(engine) as connection:
                context = MigrationContext.configure(connection, opts={"compare_type": True})
                differences = compare_metadata(context, Table.metadata)
            engine.dispose()
        finally:
            server.stop()
    for difference in differences:
        print(difference)
    print("schema drift: none" if not differences else "schema drift: write a migration")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
