"""`yoro retention`: remove raw documents that policies no longer keep."""

from collections import Counter
from typing import Annotated

import typer

from yoro.cli.connection import DEFAULT_DATA, Data
from yoro.cli.processes import Database


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(retention)


def retention(
    batch_rows: Annotated[int, typer.Option(min=1, help="Documents in one transaction.")] = 500,
    database_url: Database = None,
    data: Data = DEFAULT_DATA,
) -> None:
    """Remove raw documents older than their policy's `retention.raw_days`; run it daily."""
    from service.ingest.retention import remove_expired
    from yoro.cli.server import server

    removed: Counter[str] = Counter()
    with server("retention", database_url, data) as (engine, _):
        for batch in remove_expired(engine, batch_rows=batch_rows):
            removed[batch.policy] += batch.documents
    for policy, documents in sorted(removed.items()):
        print(f"{policy}: {documents} raw documents removed")
    if not removed:
        print("nothing has expired")
