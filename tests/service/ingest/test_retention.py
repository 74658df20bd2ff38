"""Retention: raw documents go when their policy says so, in bounded batches; duplicates stay known."""

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, text
from typer.testing import CliRunner

from service.database.engine import transaction
from service.ingest.retention import Removed, remove_expired
from service.ingest.writer import Writer
from service.schemas import TraceAccepted
from tests.conftest import MakePolicy
from tests.documents import trace
from tests.service.ingest.conftest import new_trace
from yoro.cli import app


def fill(engine: Engine, policy: int, count: int, days_old: float) -> list[dict[str, Any]]:
    documents = [trace() for _ in range(count)]
    Writer(engine).write([new_trace(policy, document) for document in documents])
    with transaction(engine) as connection:
        connection.execute(
            text(
                "UPDATE rollout_documents SET received_at = now() - make_interval(secs => :age) "
                "WHERE policy_id = :policy AND received_at > now() - interval '1 hour'"
            ),
            {"age": days_old * 86_400, "policy": policy},
        )
    return documents


def raw_left(engine: Engine, policy: int) -> int:
    with transaction(engine) as connection:
        return int(
            connection.execute(
                text("SELECT count(raw) FROM rollout_documents WHERE policy_id = :policy"), {"policy": policy}
            ).scalar_one()
        )


def test_what_is_older_goes_in_bounded_batches_and_the_rest_stays(
    engine: Engine, make_policy: MakePolicy
) -> None:
    brief = make_policy("brief", retention={"raw_days": 7}).id
    forever = make_policy("forever").id
    old = fill(engine, brief, 25, days_old=8)
    fill(engine, brief, 5, days_old=6)
    fill(engine, forever, 5, days_old=800)
    assert list(remove_expired(engine, batch_rows=10)) == [Removed("brief", n) for n in (10, 10, 5)]
    assert (raw_left(engine, brief), raw_left(engine, forever)) == (5, 5)
    assert list(remove_expired(engine)) == []
    (again,) = Writer(engine).write([new_trace(brief, old[0])])
    assert isinstance(again, TraceAccepted)
    assert again.status == "duplicate"


def test_two_runs_at_once_share_the_work(engine: Engine, make_policy: MakePolicy) -> None:
    policy = make_policy(retention={"raw_days": 1}).id
    fill(engine, policy, 60, days_old=2)
    barrier, removed = threading.Barrier(2), []

    def run() -> None:
        barrier.wait(30)
        removed.extend(batch.documents for batch in remove_expired(engine, batch_rows=7))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(removed) == 60
    assert raw_left(engine, policy) == 0


def test_the_command_says_what_it_removed(
    engine: Engine, make_policy: MakePolicy, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(retention={"raw_days": 1}).id
    fill(engine, policy, 3, days_old=2)
    monkeypatch.setenv("YORO_DATABASE_URL", database_url)
    runner = CliRunner()
    assert "support: 3 raw documents removed" in runner.invoke(app, ["retention", "--batch-rows", "2"]).output
    assert "nothing has expired" in runner.invoke(app, ["retention"]).output
