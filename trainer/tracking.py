"""Reports of steps to TensorBoard, MLflow and Weights & Biases, where they are configured.

Knows no model and no database. Invariants: a tracker that fails or hangs never fails or delays a step (a
thread of its own, a bounded queue; what goes wrong is logged and counted); reports of one policy arrive
in the order of their batches; nothing is imported that is not configured. The tables have every figure
whatever becomes of it here.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from service import telemetry
from service.settings import Settings

QUEUED = 256
"""Reports that may wait for a slow tracker before more are dropped."""
CLOSING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What became of one batch. Trackers count by batch: its number only ever rises, whatever is rewound."""

    policy: str
    batch: int
    outcome: str
    version: int | None
    """None: no step."""
    figures: Mapping[str, float]


class Tracker(Protocol):
    """One place that reports go to; called from one thread."""

    def log(self, report: StepReport) -> None:
        """Take one report; may raise whatever it likes."""
        ...

    def close(self) -> None:
        """Send what is held back."""
        ...


class Tracking:
    """Hands reports to every tracker from a thread; without trackers there is none."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        """Take trackers by the name that errors are counted under."""
        self._trackers = dict(trackers)
        self._queue: queue.Queue[StepReport | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(target=self._hand_out, name="tracking", daemon=True)
        if self._trackers:
            self._thread.start()

    def report(self, report: StepReport) -> None:
        """Queue a report and return at once."""
        if not self._trackers:
            return
        try:
            self._queue.put_nowait(report)
        except queue.Full:
            _count("queue", "full: a report was dropped")

    def close(self) -> None:
        """Wait a while for what is queued, then give up."""
        if not self._trackers:
            return
        try:
            self._queue.put(None, timeout=CLOSING_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSING_SECONDS)

    def _hand_out(self) -> None:
        while (report := self._queue.get()) is not None:
            for name, tracker in self._trackers.items():
                _guarded(name, tracker.log, report)
        for name, tracker in self._trackers.items():
            _guarded(name, tracker.close)


def _guarded(name: str, call: Callable[..., None], *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception as error:
        _count(name, f"{type(error).__name__}: {error}")


def _count(name: str, detail: str) -> None:
    telemetry.TRACKING_ERRORS.labels(name).inc()
    telemetry.logger().warning("tracking_failed", tracker=name, detail=detail)


class TensorBoard:
    """Event files in `folder/{policy}`, written by tensorboardX."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder; files appear with the first report."""
        from tensorboardX import SummaryWriter

        self._make: Callable[[str], Any] = SummaryWriter
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def log(self, report: StepReport) -> None:
        """Add every figure at the batch's number."""
        if report.policy not in self._writers:
            self._writers[report.policy] = self._make(str(self._folder / report.policy))
        writer = self._writers[report.policy]
        for name, value in _scalars(report).items():
            writer.add_scalar(name, value, report.batch)
        writer.flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()


class MLflow:
    """One run a policy, in the experiment `yoro`, found again after a restart by its tag."""

    EXPERIMENT, TAG = "yoro", "yoro.policy"

    def __init__(self, url: str) -> None:
        """Reach the tracking server at `url` (or a folder)."""
        import mlflow
        from mlflow.entities import Metric

        self._client, self._metric = mlflow.MlflowClient(tracking_uri=url), Metric
        self._runs: dict[str, str] = {}

    def log(self, report: StepReport) -> None:
        """Send every figure at the batch's number, in one request."""
        if report.policy not in self._runs:
            self._runs[report.policy] = self._run(report.policy)
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, report.batch) for name, value in _scalars(report).items()]
        self._client.log_batch(self._runs[report.policy], metrics=metrics)

    def close(self) -> None:
        """Leave the runs open: the next trainer goes on with them."""

    def _run(self, policy: str) -> str:
        known = self._client.get_experiment_by_name(self.EXPERIMENT)
        experiment = known.experiment_id if known else self._client.create_experiment(self.EXPERIMENT)
        found = self._client.search_runs([experiment], f"tags.`{self.TAG}` = '{policy}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        made = self._client.create_run(experiment, tags={self.TAG: policy}, run_name=policy)
        return str(made.info.run_id)


class WeightsAndBiases:
    """One run a policy in a project, taken up again after a restart."""

    def __init__(self, project: str) -> None:
        """Remember the project; a run begins with the first report."""
        import wandb

        self._init: Callable[..., Any] = wandb.init
        self._project = project
        self._runs: dict[str, Any] = {}

    def log(self, report: StepReport) -> None:
        """Send every figure at the batch's number."""
        if report.policy not in self._runs:
            self._runs[report.policy] = self._init(
                project=self._project, name=report.policy, id=f"yoro-{report.policy}", resume="allow",
                reinit="create_new",
            )  # fmt: skip
        self._runs[report.policy].log(_scalars(report), step=report.batch)

    def close(self) -> None:
        """Finish the runs."""
        for run in self._runs.values():
            run.finish()


def open_tracking(settings: Settings) -> Tracking:
    """Open the trackers that the server's settings name; one that cannot be opened is logged and left out."""
    wanted: dict[str, tuple[Callable[[Any], Tracker], Any]] = {
        "tensorboard": (TensorBoard, settings.tensorboard),
        "mlflow": (MLflow, settings.mlflow_url),
        "wandb": (WeightsAndBiases, settings.wandb_project),
    }
    trackers = {}
    for name, (make, where) in wanted.items():
        if where:
            try:
                trackers[name] = make(where)
            except Exception as error:
                _count(name, f"{type(error).__name__}: {error} (pip install 'yoro[tracking]')")
    return Tracking(trackers)


def _scalars(report: StepReport) -> dict[str, float]:
    stepped = {} if report.version is None else {"policy_version": float(report.version)}
    return {**report.figures, **stepped, "stepped": float(report.version is not None)}
