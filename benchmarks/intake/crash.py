"""SIGKILL of the api under load, again and again: what was answered is stored, and nothing twice."""

import itertools
import threading

import httpx
from sqlalchemy import text

from benchmarks.intake import documents
from benchmarks.intake.servers import Installation, start_api
from benchmarks.report import Report
from service.database.engine import transaction

SENDERS = 16


def measure(report: Report, where: Installation, kills: int, answers: int) -> None:
    """Kill `kills` times, each after at least `answers` acknowledgements."""
    numbers, answered = itertools.count(), set[str]()
    for _ in range(kills):
        answered |= _until_killed(where, numbers, answers)
    with transaction(where.engine) as connection:
        stored = list(
            connection.execute(
                text(
                    "SELECT trace_id FROM rollouts r JOIN rollout_documents d ON d.rollout_id = r.id "
                    "WHERE starts_with(trace_id, 'crash-')"
                )
            ).scalars()
        )
    report.add("SIGKILLs of the api under load", kills, "kills")
    report.add("traces acknowledged before them", len(answered), "traces")
    report.add("acknowledged traces that are missing", len(answered - set(stored)), "traces", 0, "less")
    report.add("traces stored twice", len(stored) - len(set(stored)), "traces", 0, "less")


def _until_killed(where: Installation, numbers: "itertools.count[int]", answers: int) -> set[str]:
    process = start_api(where)
    answered: list[str] = []
    enough = threading.Event()

    def send() -> None:
        headers = {"Authorization": f"Bearer {where.key}"}
        with httpx.Client(base_url=process.url, headers=headers, timeout=30) as client:
            while True:
                name = f"crash-{next(numbers)}"
                try:
                    answer = client.post("/v1/traces", content=documents.encoded(documents.trace(name)))
                except httpx.TransportError:
                    return
                if answer.is_success:
                    answered.append(name)
                if len(answered) >= answers:
                    enough.set()

    senders = [threading.Thread(target=send) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    enough.wait(120)
    process.kill()
    for sender in senders:
        sender.join(60)
    return set(answered)
