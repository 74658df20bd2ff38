"""The whole worker over a real Postgres: what one batch costs beside the model.

    python -m benchmarks.training.worker_arm ROLLOUTS PRECISION

Two batches through the api's own writer, the scheduler and `trainer.worker`: a small one, which loads the
base model, then the one that is measured, from the end of the first commit to the end of its own. What is
not the step is claim, rows, files, verification, probe and commit.
"""

import logging
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import structlog

from benchmarks.training import rollouts
from benchmarks.training.rollouts import Rollout, say
from benchmarks.training.step_arm import settings_of
from service.adapters.store import AdapterStore
from service.batches.scheduler import Scheduler
from service.database import engine as database
from service.database import migrate, policies
from service.database.embedded import EmbeddedPostgres
from service.database.engine import transaction
from service.ingest import grades
from service.ingest import rollouts as intake
from service.ingest.formats import native
from service.ingest.writer import Item, Writer
from service.policies import PolicySettings
from service.schemas import Grade, Trace
from service.settings import Settings
from tests.training_ground import HashingEncoder
from trainer.restore import Restorer
from trainer.worker import Worker

NAME = "bench"


def main() -> None:
    """Train two batches and say where the second one's time went."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    chosen = rollouts.load(Path(sys.argv[1]))
    settings = settings_of(sys.argv[2], 0.0).model_copy(update={"base_revision": "sha256:bench"})
    changes = {
        "batching": {"size": len(chosen), "max_ready_batches": 2},
        "objective": {"gate": "none", "reference_kl": 0.0},
        "baseline": {"estimator": "leave_one_out"},
    }
    settings = PolicySettings.model_validate(settings.model_dump() | changes)
    short = [Rollout(r.prompt[:8], r.completion[:4], r.advantage) for r in chosen]
    with tempfile.TemporaryDirectory(prefix="yoro-bench-") as folder:
        postgres = EmbeddedPostgres(Path(folder, "postgres"))
        try:
            times = _run(Path(folder), postgres.url(), settings, [*short, *chosen])
        finally:
            postgres.stop()
    marks = dict(times[times.index(next(t for t in times if t[0] == "committed")) :])
    first = next(at for point, at in times if point == "committed")
    step = marks["stepped"] - marks["rows_built"]
    say(
        total_seconds=marks["committed"] - first,
        step_seconds=step,
        overhead_seconds=marks["committed"] - first - step,
        claim_seconds=marks["batch_claimed"] - first,
        rows_seconds=marks["rows_built"] - marks["batch_claimed"],
        files_seconds=marks["files_written"] - marks["stepped"],
        commit_seconds=marks["committed"] - marks["before_commit"],
    )


def _run(folder: Path, url: str, settings: PolicySettings, chosen: list[Rollout]) -> list[tuple[str, float]]:
    engine = database.connect(url, name="bench")
    migrate.upgrade(engine)
    with transaction(engine) as connection:
        policy_id = policies.create(connection, NAME, settings)
    for outcome in Writer(engine).write(
        [i for n, r in enumerate(chosen) for i in _items(n, r, policy_id, settings)]
    ):
        assert not isinstance(outcome, Exception), outcome
    scheduler = Scheduler(engine, HashingEncoder(), interval_seconds=1)
    while scheduler.tick():
        pass
    server = Settings(database_url=url, data=folder, trainer_interval_seconds=0.05)
    store, stop = AdapterStore(server.store_url), threading.Event()
    times: list[tuple[str, float]] = []

    def at(point: str) -> None:
        times.append((point, time.perf_counter()))
        if [name for name, _ in times].count("committed") == 2:
            stop.set()

    Worker(engine, store, server, "bench", Restorer(store, server), at).run(stop)
    engine.dispose()
    return times


def _items(number: int, rollout: Rollout, policy_id: int, settings: PolicySettings) -> list[Item]:
    call: dict[str, Any] = {
        "message_index": 1,
        "prompt_token_ids": rollout.prompt,
        "completion_token_ids": rollout.completion,
        "logprobs": [-1.0] * len(rollout.completion),
        "logprobs_mode": "processed",
        "policy_version": 0,
    }
    document = {
        "trace_id": f"t{number:05d}",
        "policy_version": 0,
        "sampling": {"temperature": 1.0},
        "messages": [
            {"role": "user", "content": f"task {number}"},
            {"role": "assistant", "content": "answer"},
        ],
        "calls": [call],
    }
    trace = native.validate(Trace, document)
    graded = native.validate(
        Grade, {"trace_id": trace.trace_id, "grader": "g", "value": 0.5 + rollout.advantage}
    )
    return [
        intake.prepare(trace, b"{}", policy_id=policy_id, policy=NAME, key=b"key"),
        grades.prepare(graded, policy_id=policy_id, rule=settings.reward),
    ]


if __name__ == "__main__":
    main()
