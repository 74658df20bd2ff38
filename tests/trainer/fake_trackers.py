"""Stand-ins for the packages mlflow and wandb, with as much of their interface as is called.

The real ones are 200 MB of dependencies: trainer/tracking.py was run against them by hand (docs/training.md).
"""

import sys
from types import ModuleType
from typing import Any

import pytest

calls: dict[str, list[Any]] = {"mlflow": [], "wandb": []}
runs: list[str] = []


class Info:
    """An MLflow run."""

    def __init__(self, run_id: str) -> None:
        self.info = self
        self.run_id = run_id


class MlflowClient:
    """Remembers runs and what is logged to them."""

    def __init__(self, tracking_uri: str) -> None:
        calls["mlflow"].append(("client", tracking_uri))

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "experiment"

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Info]:
        return [Info(run) for run in runs if f"'{run}'" in filter_string]

    def create_run(self, experiment: str, *, tags: dict[str, str], run_name: str) -> Info:
        runs.append(run_name)
        calls["mlflow"].append(("run", run_name))
        return Info(run_name)

    def log_batch(self, run_id: str, metrics: list[tuple[Any, ...]]) -> None:
        calls["mlflow"].append((run_id, [(key, value, step) for key, value, _, step in metrics]))


class Run:
    """A Weights & Biases run."""

    def log(self, figures: dict[str, float], step: int) -> None:
        calls["wandb"].append((step, figures["reward/mean"]))

    def finish(self) -> None:
        calls["wandb"].append("finished")


def init(**options: Any) -> Run:
    """Begin or resume a run."""
    calls["wandb"].append((options["project"], options["id"], options["resume"]))
    return Run()


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Put the stand-ins where imports find them; return what will be called."""
    for heard in (*calls.values(), runs):
        heard.clear()
    modules: dict[str, dict[str, Any]] = {
        "mlflow": {"MlflowClient": MlflowClient},
        "mlflow.entities": {"Metric": lambda *values: values},
        "wandb": {"init": init},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return calls
