"""Consumers added and killed, the broker killed and started, while agents and graders publish.

Which broker lives through what is theirs to say (brokers.py). `make soak-kafka` runs ten times as much.
"""

import os
import threading
import time

import pytest
from sqlalchemy import text

from service.database.engine import transaction
from service.ingest.kafka import Publisher
from service.ingest.messages import Message
from tests.conftest import MakePolicy
from tests.documents import grade, trace
from tests.service.ingest.kafka_door.conftest import LIMITS, PARTITIONS, Door, Process, await_that, message

COUNT = int(os.environ.get("YORO_KAFKA_TRACES", "2000"))
ROUNDS = int(os.environ.get("YORO_KAFKA_ROUNDS", "1"))
CHUNK = 50
OUTSTANDING = 400
"""Traces sent and not stored yet, beyond which the agents wait: so that every kill hits work in hand."""
SECONDS_BETWEEN_KILLS = 10.0
SECONDS = 60.0 * (1 + ROUNDS)


class Sending(threading.Thread):
    """Agents and graders: each grade before or after its trace, and one message in a hundred is poison."""

    def __init__(self, door: Door) -> None:
        super().__init__(daemon=True)
        self.door = door
        self.traces = [trace(trace_id=f"trace-{number}") for number in range(COUNT)]
        self.poison = {b'{"poison": %d' % number for number in range(COUNT // 100)}
        self.failed: list[BaseException] = []
        self.quiet = threading.Lock()
        """Held, nothing is being sent: a broker that is stopped loses what it confirms meanwhile."""

    def run(self) -> None:
        try:
            publisher = Publisher(self.door.settings, LIMITS)
            poison = sorted(self.poison)
            for start in range(0, COUNT, CHUNK):
                await_that(lambda at=start: at - self.door.count("rollout_documents") < OUTSTANDING, SECONDS)  # type: ignore[misc]
                chunk = self.traces[start : start + CHUNK]
                traces = [message(self.door.traces, document) for document in chunk]
                grades = [message(self.door.rewards, grade(document["trace_id"])) for document in chunk]
                bad = [
                    message(self.door.traces, value)
                    for value in poison[start // 100 : (start + CHUNK) // 100]
                ]
                self._send(publisher, traces + grades + bad if start % 200 else grades + bad + traces)
            publisher.close()
        except BaseException as error:
            self.failed.append(error)
            raise

    def _send(self, publisher: Publisher, messages: list[Message]) -> None:
        """Send until the broker has all: what it did not confirm is sent again, and may be there twice."""
        while messages:
            with self.quiet:
                errors = publisher.send(messages)
            messages = [sent for sent, error in zip(messages, errors, strict=True) if error]


def end(door: Door, process: Process) -> None:
    """Kill a consumer; where a silent member keeps its partitions for ever, ask it to go instead."""
    if door.broker.evicts:
        process.kill()
    else:
        assert process.terminate() == 0


def all_are_in(consumers: list[Process]) -> bool:
    """Whether nobody is on the way into the group: a stop that cuts a join short leaves a silent member.

    The sum alone does not tell: one who is alone has all, while the other is still starting.
    """
    owned = [process.partitions() for process in consumers]
    return all(owned) and sum(owned) == 2 * PARTITIONS


def await_progress(door: Door, beyond: int) -> None:
    await_that(lambda: door.count("rollout_documents") > beyond, SECONDS)


@pytest.mark.timeout(240 + 120 * ROUNDS)
def test_every_message_is_there_once_whatever_dies(door: Door, make_policy: MakePolicy) -> None:
    make_policy()
    sending = Sending(door)
    consumers = [door.process(), door.process()]
    sending.start()
    for number in range(ROUNDS):
        await_progress(door, COUNT * number // (ROUNDS + 1))
        started = time.monotonic()
        consumers.append(door.process())
        end(door, consumers.pop(0))
        if door.broker.keeps_data:
            await_that(lambda: all_are_in(consumers), SECONDS)
            with sending.quiet:
                door.broker.stop()
                door.broker.start()
        await_progress(door, COUNT * (number + 1) // (ROUNDS + 1))
        while ROUNDS > 1 and time.monotonic() - started < SECONDS_BETWEEN_KILLS:
            time.sleep(0.2)

    await_that(lambda: bool(sending.failed) or not sending.is_alive(), SECONDS)
    assert not sending.failed
    await_that(lambda: not missing(door, sending), SECONDS)
    assert [process.terminate() for process in consumers] == [0, 0]
    assert missing(door, sending) == []


def missing(door: Door, sending: Sending) -> list[str]:
    """Return what is not there, or not once: traces, their grades, the letters of poison."""
    with transaction(door.engine) as connection:
        rows = connection.execute(
            text(
                "SELECT r.trace_id, count(g.id) FROM rollouts r"
                " JOIN rollout_documents d ON d.rollout_id = r.id"
                " LEFT JOIN grades g ON g.rollout_id = r.id GROUP BY r.id"
            )
        ).all()
    stored = {(trace_id, grades) for trace_id, grades in rows}
    wanted = {(document["trace_id"], 1) for document in sending.traces}
    letters = {letter.value for letter in door.letters()}
    return sorted(map(str, [*(stored ^ wanted), *(letters ^ sending.poison)]))
