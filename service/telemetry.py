"""Every log and metric name of the service, and one way to set logging up.

Logs are one line a fact, as JSON where no terminal listens.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import ThreadingHTTPServer

import structlog
from prometheus_client import Counter, Gauge, Histogram, MetricsHandler

from service.errors import YoroError

TRACES = Counter("yoro_traces_total", "Traces by what became of them", ["status"])
GRADES = Counter("yoro_grades_total", "Grades by what became of them", ["status"])
WRITE_SECONDS = Histogram("yoro_write_seconds", "One group commit of the writer")
WRITE_ITEMS = Histogram("yoro_write_items", "Items in one group commit", buckets=(1, 4, 16, 64, 256, 1024))
QUEUE_ITEMS = Gauge("yoro_write_queue_items", "Items waiting for the writer")
OVERLOADS = Counter("yoro_overloads_total", "Requests answered 503 because the writer's queue was full")
BATCHES = Counter("yoro_batches_total", "Batches formed", ["policy"])
STEPS = Counter("yoro_steps_total", "Batches ended by the trainer", ["policy", "outcome"])
STEP_SECONDS = Histogram("yoro_step_seconds", "Claim to commit of one batch", ["policy"])
HEAD_VERSION = Gauge("yoro_head_version", "Version that training goes on from", ["policy"])
PROMOTED_VERSION = Gauge("yoro_promoted_version", "Version that should serve", ["policy"])
STEP_FIGURES = Gauge("yoro_step_figure", "Figures of the last batch that was trained", ["policy", "figure"])
TRAINED_TOKENS = Counter("yoro_trained_tokens_total", "Sampled tokens of trained batches", ["policy"])
TRAINED_ROLLOUTS = Counter(
    "yoro_trained_rollouts_total", "Rollouts of trained batches, by what became of them",
    ["policy", "outcome"],
)  # fmt: skip
TRACKING_ERRORS = Counter("yoro_tracking_errors_total", "Reports that a tracker did not take", ["tracker"])
GUARD_ACTS = Counter(
    "yoro_guard_acts_total", "What guards did to a policy by themselves", ["policy", "guard", "deed"]
)
PAUSED = Gauge("yoro_policy_paused", "1 while a person or a guard has paused it", ["policy"])
CONSUMED = Counter("yoro_consumed_total", "Kafka messages by what became of them", ["topic", "result"])
CONSUMED_GRADES_LEFT_OUT = Counter(
    "yoro_consumed_grades_left_out_total", "Embedded rewards of topics not trusted for grades", ["topic"]
)
CONSUMER_BATCH = Histogram(
    "yoro_consumer_batch_messages", "Messages in one transaction", buckets=(1, 4, 16, 64, 256, 1024)
)
CONSUMER_WRITE_SECONDS = Histogram("yoro_consumer_write_seconds", "One transaction of the consumer")
CONSUMER_COMMIT_SECONDS = Histogram("yoro_consumer_commit_seconds", "One commit of offsets")
CONSUMER_LAG = Gauge("yoro_consumer_lag_messages", "Messages not durable yet", ["topic", "partition"])
CONSUMER_OLDEST = Gauge(
    "yoro_consumer_oldest_seconds", "Age of the oldest message not durable yet", ["topic", "partition"]
)
DEAD_LETTERS = Counter("yoro_dead_letters_total", "Messages that could not be taken", ["topic", "code"])
DEAD_LETTERS_RELAYED = Counter("yoro_dead_letters_relayed_total", "Dead letters sent on", ["outcome"])


def count_step(
    policy: str,
    outcome: str,
    *,
    version: int | None,
    figures: Mapping[str, float],
    policy_tokens: int,
    reasons: Sequence[str],
) -> None:
    """Count what became of a batch; `reasons` of its members, empty for those that were trained on."""
    STEPS.labels(policy, outcome).inc()
    for name, value in figures.items():
        STEP_FIGURES.labels(policy, name).set(value)
    if version is None:
        return
    TRAINED_TOKENS.labels(policy).inc(policy_tokens)
    for reason in reasons:
        TRAINED_ROLLOUTS.labels(policy, reason.partition(":")[0] or "trained").inc()


def set_up_logging(process: str) -> None:
    """Log to standard error: coloured for a person, JSON for a machine."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


def logger() -> structlog.typing.FilteringBoundLogger:
    """Return the process's logger."""
    bound: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return bound


def serve_probes(port: int, ready: Callable[[], bool]) -> None:
    """Serve /metrics, /healthz and /readyz of a process that has no HTTP of its own, from a thread."""

    class Probes(MetricsHandler):
        def do_GET(self) -> None:  # noqa: N802 - the standard library's name
            if self.path == "/healthz":
                self._answer(200, b"ok")
            elif self.path == "/readyz":
                self._answer(*((200, b"ready") if _is_ready(ready) else (503, b"not ready")))
            else:
                super().do_GET()

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("", port), Probes)
    threading.Thread(target=server.serve_forever, name="probes", daemon=True).start()


def _is_ready(ready: Callable[[], bool]) -> bool:
    try:
        return ready()
    except YoroError:
        return False
