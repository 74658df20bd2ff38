"""Group commit: bounded, nobody is answered before the commit, nothing taken is lost."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text

from service.database.engine import transaction
from service.errors import Unavailable
from service.ingest.group_commit import MAX_ITEMS, WORTH_ITEMS, GroupCommit
from service.ingest.writer import Item, Outcome, Writer
from service.schemas import TraceAccepted
from tests.conftest import MakePolicy
from tests.documents import trace
from tests.service.ingest.conftest import new_trace


class Gate:
    """Holds a writer's transactions before their commit until it is opened."""

    def __init__(self) -> None:
        self.held, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.held.set()
        assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


class FirstHeld(Gate):
    """Holds the first transaction alone."""

    def __call__(self) -> None:
        if not self.held.is_set():
            super().__call__()


def one(policy: int) -> list[Item]:
    return [new_trace(policy, trace())]


def stored(engine: Engine) -> int:
    with transaction(engine) as connection:
        return int(connection.execute(text("SELECT count(*) FROM rollouts")).scalar_one())


def test_nobody_is_answered_before_the_commit(engine: Engine, make_policy: MakePolicy) -> None:
    policy, gate = make_policy().id, Gate()
    writes = GroupCommit(Writer(engine, before_commit=gate), max_items=10, max_bytes=1000)
    answer = writes.submit(one(policy), 1)
    assert gate.held.wait(30)
    assert not answer.done()
    gate.open()
    (outcome,) = answer.result(30)
    assert isinstance(outcome, TraceAccepted)
    writes.close()


@pytest.mark.parametrize(("max_items", "max_bytes", "size"), [(3, 1000, 1), (1000, 120, 10)])
def test_beyond_items_or_bytes_callers_are_refused_and_the_rest_is_written(
    max_items: int, max_bytes: int, size: int, engine: Engine, make_policy: MakePolicy
) -> None:
    policy, gate = make_policy().id, Gate()
    writes = GroupCommit(Writer(engine, before_commit=gate), max_items=max_items, max_bytes=max_bytes)
    taken: list[Future[list[Outcome]]] = [writes.submit(one(policy), size)]
    assert gate.held.wait(30)  # what is being written no longer counts
    taken += [writes.submit(one(policy), size) for _ in range(3)]
    with pytest.raises(Unavailable) as raised:
        writes.submit(one(policy), size)
    assert raised.value.code == "overloaded"
    gate.open()
    assert all(isinstance(future.result(30)[0], TraceAccepted) for future in taken)
    writes.submit(one(policy), size).result(30)
    writes.close()
    assert stored(engine) == 5


@pytest.mark.parametrize(("in_hand", "enough"), [(2, WORTH_ITEMS), (WORTH_ITEMS + 2, WORTH_ITEMS + 2)])
def test_a_second_transaction_waits_until_it_is_as_large_as_the_first_and_worth_it(
    in_hand: int, enough: int, engine: Engine, make_policy: MakePolicy
) -> None:
    policy, gate = make_policy().id, FirstHeld()
    writer = Writer(engine, before_commit=gate)
    writes = GroupCommit(writer, max_items=100, max_bytes=1000, threads=2, patience=60.0)
    first = writes.submit([item for _ in range(in_hand) for item in one(policy)], 1)
    assert gate.held.wait(30)
    others = [writes.submit(one(policy), 1) for _ in range(enough)]
    assert all(isinstance(future.result(30)[0], TraceAccepted) for future in others)
    assert not first.done()
    gate.open()
    assert len(first.result(30)) == in_hand
    writes.close()
    with transaction(engine) as connection:
        found = connection.execute(text("SELECT count(DISTINCT xmin::text) FROM rollouts")).scalar_one()
    assert found == 2, "those that came one by one share a transaction"


def test_what_finds_no_company_is_written_beside_a_transaction_that_hangs(
    engine: Engine, make_policy: MakePolicy
) -> None:
    policy, gate = make_policy().id, FirstHeld()
    writes = GroupCommit(Writer(engine, before_commit=gate), max_items=10, max_bytes=1000, threads=2)
    first = writes.submit(one(policy) + one(policy), 1)
    assert gate.held.wait(30)
    assert isinstance(writes.submit(one(policy), 1).result(30)[0], TraceAccepted)
    assert not first.done()
    gate.open()
    writes.close()


def test_a_single_caller_beyond_the_bound_is_still_served(engine: Engine, make_policy: MakePolicy) -> None:
    policy = make_policy().id
    writes = GroupCommit(Writer(engine), max_items=2, max_bytes=10)
    items: Sequence[Item] = [new_trace(policy, trace()) for _ in range(MAX_ITEMS + 1)]
    assert len(writes.submit(items, 10_000).result(60)) == MAX_ITEMS + 1
    writes.close()


def test_closing_writes_what_is_queued(engine: Engine, make_policy: MakePolicy) -> None:
    policy, gate = make_policy().id, Gate()
    writes = GroupCommit(Writer(engine, before_commit=gate), max_items=100, max_bytes=1000)
    taken = [writes.submit(one(policy), 1) for _ in range(20)]
    closing = threading.Thread(target=writes.close)
    closing.start()
    gate.open()
    closing.join(30)
    assert stored(engine) == len([future for future in taken if future.result(0)]) == 20


def test_a_client_that_goes_away_costs_its_neighbours_nothing(
    engine: Engine, make_policy: MakePolicy
) -> None:
    policy, gate = make_policy().id, Gate()
    writes = GroupCommit(Writer(engine, before_commit=gate), max_items=100, max_bytes=1000)

    async def run() -> list[Outcome]:
        gone = asyncio.create_task(writes.write(one(policy), 1))
        stays = asyncio.create_task(writes.write(one(policy), 1))
        await asyncio.sleep(0)
        gone.cancel()
        gate.open()
        return await stays

    (outcome,) = asyncio.run(run())
    assert isinstance(outcome, TraceAccepted)
    writes.close()
    assert stored(engine) == 2, "what was taken is stored, whether anyone waits or not"


def test_many_threads_share_commits_and_each_gets_its_own_answer(
    engine: Engine, make_policy: MakePolicy
) -> None:
    policy = make_policy().id
    commits: list[None] = []
    writes = GroupCommit(
        Writer(engine, before_commit=lambda: commits.append(None)), max_items=1000, max_bytes=10**6
    )
    barrier = threading.Barrier(40)

    def post(number: int) -> bool:
        item = new_trace(policy, trace(trace_id=f"own-{number}"))
        barrier.wait(30)
        (outcome,) = writes.submit([item], 1).result(30)
        return isinstance(outcome, TraceAccepted) and outcome.trace_id == f"own-{number}"

    with ThreadPoolExecutor(40) as pool:
        assert all(pool.map(post, range(40)))
    writes.close()
    assert len(commits) < 40
