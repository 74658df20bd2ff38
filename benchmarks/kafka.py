"""`make bench-kafka`: how fast what Kafka holds becomes durable, beside the writer fed directly.

    python -m benchmarks.kafka [--traces 5000] [--repeats 3]

One consumer, one process, Postgres on the same cores with fsync and synchronous_commit on, documents of
about 4 KB. Three arms alternate over the same documents, and ratios are taken run by run:
`written`, the writer alone on items prepared beforehand, 500 at a time; `prepared and written`, the same
with parsing and normalising; `consumed`, from the first message polled to the last one durable, out of an
embedded broker (noida-db, which is not Apache Kafka) that holds them all. Offsets are committed.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.intake import documents
from benchmarks.intake.servers import Installation, installation
from benchmarks.report import Report
from service.api.directory import Directory
from service.database.secrets import fingerprint_key
from service.ingest.consumer_lag import LagMeter
from service.ingest.consuming import SWITCH_SECONDS, Consumer
from service.ingest.intake import Intake
from service.ingest.kafka import Publisher, Subscription, create_topics
from service.ingest.message_reader import Reader, Refusal
from service.ingest.messages import Message, Partition, topics_of
from service.ingest.writer import Writer
from service.settings import KafkaSettings, Limits
from yoro.broker import EmbeddedBroker
from yoro.ports import free_port

BATCH = 500
LIMITS = Limits()
PARTITIONS = 4


@dataclass(frozen=True, slots=True)
class Bench:
    """What all arms share."""

    where: Installation
    settings: KafkaSettings
    reader: Reader

    @property
    def topic(self) -> str:
        """Return where traces are published."""
        return self.settings.traces_topic

    def messages(self, name: str, count: int) -> list[Message]:
        """Return traces that no arm has seen."""
        return [
            Message(Partition(self.topic, -1), 0, key.encode(), documents.encoded(documents.trace(key)))
            for key in (f"{name}-{number}" for number in range(count))
        ]

    def written(self, messages: Sequence[Message]) -> float:
        """Return traces a second of the writer alone."""
        batches = [self.reader.read(part) for part in _parts(messages)]
        started = time.perf_counter()
        for batch in batches:
            Writer(self.where.engine).write([item for item in batch if not isinstance(item, Refusal)])
        return len(messages) / (time.perf_counter() - started)

    def prepared_and_written(self, messages: Sequence[Message]) -> float:
        """Return traces a second from bytes to durable rows, without Kafka."""
        started = time.perf_counter()
        for part in _parts(messages):
            items = [item for item in self.reader.read(part) if not isinstance(item, Refusal)]
            Writer(self.where.engine).write(items)
        return len(messages) / (time.perf_counter() - started)

    def consumed(self, messages: Sequence[Message]) -> float:
        """Return traces a second from the first poll that brought any to the last transaction."""
        publisher = Publisher(self.settings, LIMITS)
        assert publisher.send(messages) == [""] * len(messages)
        publisher.close()
        meter, stop = Watch(len(messages)), threading.Event()
        subscription = Subscription(self.settings, LIMITS, [self.topic])
        consumer = Consumer(subscription, self.reader, Writer(self.where.engine), meter)
        thread = threading.Thread(target=consumer.run, args=(stop,))
        thread.start()
        assert meter.complete.wait(300)
        stop.set()
        thread.join()
        subscription.close()
        return len(messages) / (meter.ended - meter.began)


class Watch(LagMeter):
    """Notes when the first message came and when the last one was durable."""

    def __init__(self, count: int) -> None:
        super().__init__(limit_seconds=300)
        self.began = self.ended = 0.0
        self.complete = threading.Event()
        self._left = count

    def polled(self, messages: Sequence[Message]) -> None:
        """Note the first."""
        if messages and not self.began:
            self.began = time.perf_counter()
        super().polled(messages)

    def stored(self, messages: Sequence[Message]) -> None:
        """Note the last."""
        super().stored(messages)
        self._left -= len(messages)
        if self._left <= 0:
            self.ended = time.perf_counter()
            self.complete.set()


def main() -> int:
    """Measure, print and write; return 1 where a figure falls short."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=int, default=5_000, help="of each run of each arm")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm")
    asked = parser.parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)  # as `yoro consume` does
    report = Report("kafka", "python -m benchmarks.kafka " + " ".join(sys.argv[1:]))
    with _started() as bench:
        runs = [_run(bench, number, asked.traces) for number in range(asked.repeats)]
    for name in runs[0]:
        report.add(name, median(run[name] for run in runs), "traces/s")
    for arm, bound in (("prepared and written", 0.8), ("written", None)):
        ratio = median(run["consumed"] / run[arm] for run in runs)
        report.add(f"consumed over {arm}, batches of {BATCH}", ratio, "ratio", bound)
    return 0 if report.write() else 1


def _run(bench: Bench, number: int, count: int) -> dict[str, float]:
    arms: dict[str, Callable[[Sequence[Message]], float]] = {
        "written": bench.written,
        "prepared and written": bench.prepared_and_written,
        "consumed": bench.consumed,
    }
    found = {}
    for name in sorted(arms, reverse=bool(number % 2)):
        bench.where.empty()
        found[name] = arms[name](bench.messages(f"{name.replace(' ', '-')}-{number}", count))
        assert bench.where.count("rollout_documents") == count
    return found


def _parts(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    return (messages[start : start + BATCH] for start in range(0, len(messages), BATCH))


@contextmanager
def _started() -> Iterator[Bench]:
    """Run Postgres and a broker with the topics."""
    with installation() as where, tempfile.TemporaryDirectory(prefix="yoro-bench-kafka-") as folder:
        broker = EmbeddedBroker(Path(folder) / "kafka", free_port())
        directory = Directory(where.engine)
        directory.start()
        try:
            settings = KafkaSettings(bootstrap=broker.bootstrap, poll_messages=BATCH)
            create_topics(settings, LIMITS, [settings.traces_topic], partitions=PARTITIONS, replication=1)
            intake = Intake(LIMITS, fingerprint_key(where.engine))
            yield Bench(where, settings, Reader(intake, directory, topics_of(settings)))
        finally:
            directory.close()
            broker.stop()


if __name__ == "__main__":
    sys.exit(main())
