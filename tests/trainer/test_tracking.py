"""Trackers take every figure, in order; one that fails or hangs costs a step nothing."""

import struct
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from service.settings import Settings
from tests.trainer import fake_trackers
from trainer import tracking
from trainer.tracking import StepReport, TensorBoard, Tracking, open_tracking


def report(batch: int, version: int | None = None, policy: str = "p") -> StepReport:
    outcome = "trained" if version is not None else "no_signal"
    return StepReport(policy, batch, outcome, version, {"reward/mean": batch / 10, "entropy": 1.5})


def errors(name: str) -> float:
    return REGISTRY.get_sample_value("yoro_tracking_errors_total", {"tracker": name}) or 0.0


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """Read event files back: records of length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_files_have_every_figure_of_every_batch_by_policy(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    for each in (report(1, 1), report(2), report(3, 2), report(1, 1, policy="q")):
        tracker.log(each)
    tracker.close()
    found = scalars(tmp_path / "p")
    assert [(step, pytest.approx(value)) for step, tag, value in found if tag == "reward/mean"] == [
        (1, 0.1), (2, 0.2), (3, 0.3),
    ]  # fmt: skip
    assert [(step, value) for step, tag, value in found if tag == "policy_version"] == [(1, 1.0), (3, 2.0)]
    assert [(step, value) for step, tag, value in found if tag == "stepped"] == [(1, 1), (2, 0), (3, 1)]
    assert {step for step, _, _ in scalars(tmp_path / "q")} == {1}


class Failing:
    def log(self, report: StepReport) -> None:
        raise ConnectionError("the server is away")

    def close(self) -> None:
        raise ConnectionError("still")


class Keeping:
    def __init__(self) -> None:
        self.batches: list[int] = []

    def log(self, report: StepReport) -> None:
        self.batches.append(report.batch)

    def close(self) -> None:
        self.batches.append(-1)


def test_a_tracker_that_fails_is_counted_and_the_others_hear_everything() -> None:
    keeping, before = Keeping(), errors("failing")
    opened = Tracking({"failing": Failing(), "keeping": keeping})
    for batch in range(5):
        opened.report(report(batch))
    opened.close()
    assert keeping.batches == [0, 1, 2, 3, 4, -1]
    assert errors("failing") == before + 6


def test_a_tracker_that_hangs_stops_nobody_and_what_is_too_much_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "QUEUED", 2)
    hanging, entered, before = threading.Event(), threading.Event(), errors("queue")

    class Hanging(Keeping):
        def log(self, report: StepReport) -> None:
            entered.set()
            hanging.wait(60)
            super().log(report)

    slow = Hanging()
    opened = Tracking({"hanging": slow})
    opened.report(report(0))
    assert entered.wait(10)
    for batch in range(1, 5):
        opened.report(report(batch))  # returns at once
    assert errors("queue") == before + 2
    hanging.set()
    opened.close()
    assert slow.batches == [0, 1, 2, -1]


def test_mlflow_and_wandb_get_one_run_a_policy_and_go_on_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = fake_trackers.install(monkeypatch)
    settings = Settings(mlflow_url="http://mlflow", wandb_project="agents")
    for batch in (1, 2):
        opened = open_tracking(settings)
        opened.report(report(batch))
        opened.close()
    figures = [("reward/mean", 0.1, 1), ("entropy", 1.5, 1), ("stepped", 0.0, 1)]
    assert foreign["mlflow"][:3] == [("client", "http://mlflow"), ("run", "p"), ("p", figures)]
    assert [call[0] for call in foreign["mlflow"][3:]] == ["client", "p"]
    assert foreign["wandb"] == [
        ("agents", "yoro-p", "allow"), (1, 0.1), "finished",
        ("agents", "yoro-p", "allow"), (2, 0.2), "finished",
    ]  # fmt: skip


def test_what_is_configured_but_not_installed_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = errors("wandb")
    opened = open_tracking(Settings(wandb_project="agents"))
    opened.report(report(1))
    opened.close()
    assert errors("wandb") == before + 1
