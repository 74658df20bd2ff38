"""`yoro calibrate | bakeoff | group-size`: which baseline is best, and are groups better.

Files, tables and pictures; the measuring itself is `service.baselines`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect

if TYPE_CHECKING:
    from service.baselines.calibration import ReplayedBatch, Score
    from service.baselines.calibration_sets import CalibrationSet

SCORED_BATCHES = 200
"""Batches that are replayed unless `--replays` says otherwise."""


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command()(calibrate)
    app.command()(bakeoff)
    app.command("group-size")(group_size)


def calibrate(
    file: Annotated[
        Path, typer.Argument(help='Lines of {"task_id", "prompt", "rewards": [..], "system"?, "context"?}.')
    ],
    *,
    batch_size: Annotated[int, typer.Option(min=2, help="B, rollouts a batch.")] = 32,
    window: Annotated[int, typer.Option(min=0, help="Earlier batches of history.")] = 16,
    estimators: Annotated[str, typer.Option(help="Names to show, with commas; empty: all.")] = "",
    replays: Annotated[int, typer.Option(min=0, help="Permutations of the tasks; 0: 200 batches.")] = 0,
    warm_up: Annotated[int, typer.Option(min=0, help="First batches of a replay not scored.")] = 0,
    minimum_rewards: Annotated[int, typer.Option(min=2, help="Leave other tasks out.")] = 2,
    seed: Annotated[int, typer.Option(help="Of permutations, rollouts and intervals.")] = 0,
    encoder: Annotated[str, typer.Option(help="Sentence encoder: name or folder.")] = "all-MiniLM-L6-v2",
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart as PNG.")] = None,
) -> None:
    """Measure every baseline's effective batch size from tasks that have several rewards."""
    from service.baselines.calibration import ESTIMATED, scores
    from service.baselines.calibration_sets import read_calibration_set
    from service.baselines.embedding import Encoder

    names = [name.strip() for name in estimators.split(",") if name.strip()] or list(ESTIMATED)
    if unknown := [name for name in names if name not in ESTIMATED]:
        raise typer.BadParameter(f"no estimator {', '.join(unknown)}; there are {', '.join(ESTIMATED)}")
    try:
        with file.open(encoding="utf-8") as lines:
            data = read_calibration_set(lines, Encoder(encoder).encode, minimum_rewards=minimum_rewards)
    except ValueError as error:
        raise typer.BadParameter(f"{file}: {error}") from error
    if len(data.tasks) // batch_size <= warm_up:
        raise typer.BadParameter(
            f"{len(data.tasks)} tasks make no batch of {batch_size} after {warm_up} of warm-up"
        )
    batches = _replayed(data, batch_size, window, replays, seed)
    scored = [batch for batch in batches if batch.number >= warm_up]
    every = scores(data, scored, batch_size=batch_size, seed=seed)
    found = {name: every[name] for name in names}
    report = _report(data, found, batch_size=batch_size, window=window, batches=len(scored), seed=seed)
    _print(report)
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        draw(report, plot, title=file.stem)


def _replayed(
    data: "CalibrationSet", batch_size: int, window: int, replays: int, seed: int
) -> list["ReplayedBatch"]:
    from service.baselines.calibration import replayed

    a_replay = len(data.tasks) // batch_size
    replays = replays or math.ceil(SCORED_BATCHES / max(a_replay, 1))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("replaying batches", total=replays * a_replay)
        stream = replayed(
            data, batch_size=batch_size, window_batches=window, replays=replays, seed=seed,
            on_batch=lambda: progress.advance(bar),
        )  # fmt: skip
        return list(stream)


def _report(data: "CalibrationSet", found: Mapping[str, "Score"], **settings: int) -> dict[str, Any]:
    from service.baselines.effective_batch import between_task_variance, within_task_variance

    return {
        "tasks": len(data.tasks),
        "settings": settings,
        "within_task_variance": float(within_task_variance(data.rewards).mean()),
        "between_task_variance": between_task_variance(data.rewards),
        "estimators": {name: asdict(score) for name, score in found.items()},
    }


def _print(report: Mapping[str, Any]) -> None:
    size = report["settings"]["batch_size"]
    table = Table("estimator", "MSE", f"B_eff of {size}", "ratio to leave_one_out")
    for name, score in report["estimators"].items():
        table.add_row(name, f"{score['mse']:.4f}", _interval(score["size"], 1), _interval(score["ratio"], 3))
    Console().print(
        f"{report['tasks']} tasks, {report['settings']['batches']} batches scored; noise within tasks "
        f"σ²_ε = {report['within_task_variance']:.3f}, spread between tasks "
        f"σ²_μ = {report['between_task_variance']:.3f}"
    )
    Console().print(table)


def _interval(interval: Mapping[str, float], digits: int) -> str:
    value, low, high = (f"{interval[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value}  [{low}, {high}]"


def draw(report: Mapping[str, Any], path: Path, *, title: str) -> None:
    """Draw effective batch sizes with their intervals, worst first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sorted(report["estimators"].items(), key=lambda row: row[1]["size"]["value"])
    values = [score["size"]["value"] for _, score in rows]
    spans = [[s["size"]["value"] - s["size"]["low"] for _, s in rows],
             [s["size"]["high"] - s["size"]["value"] for _, s in rows]]  # fmt: skip
    figure = Figure(figsize=(7, 0.45 * len(rows) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([name for name, _ in rows], values, xerr=spans, color="#4c78a8", ecolor="#333", capsize=3)
    size = report["settings"]["batch_size"]
    axes.axvline(size, color="#999", linestyle=":", label=f"perfect baseline: {size}")
    axes.set_xlabel("effective batch size (95 % interval over tasks)")
    axes.set_title(title)
    figure.legend(loc="outside lower right", frameon=False)  # within the axes it would lie on the line
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)


def bakeoff(
    policy: Annotated[str, typer.Option(help="Whose logged batches.")],
    batches: Annotated[int, typer.Option(min=1, max=2000, help="The last so many.")] = 200,
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Compare every baseline on a policy's own batches; no task need be tried twice."""
    with connect(url, key, data) as client:
        found = client.baselines(policy, batches)
    table = Table("estimator", "B_eff / batch mean's", "95 % interval", "batches")
    for entry in found["baselines"]:
        name = entry["estimator"] + (" (in use)" if entry["estimator"] == found["in_use"] else "")
        interval = f"{entry['low']:.2f} – {entry['high']:.2f}"
        table.add_row(name, f"{entry['ratio']:.2f}", interval, str(entry["batches"]))
    Console().print(table)
    if not found["baselines"]:
        Console().print(f"{policy} has no batch with logged errors yet")


def group_size(
    rho: Annotated[float, typer.Option(min=0, help="MSE(b) / σ²_ε of the baseline: B / B_eff − 1.")],
    kappa: Annotated[
        float, typer.Option(min=0, help="Variance of the mean gradient between tasks over that within one.")
    ] = 0.0,
) -> None:
    """Compare one rollout a task with groups of the same total size."""
    from service.baselines.group_size import break_even_rho, gradient_variance

    alone = gradient_variance(1, rho=rho, kappa=kappa)
    table = Table("rollouts a task", "gradient variance", "relative to 1", "1 is better while ρ <")
    table.add_row("1", f"{alone:.3f}", "1.00", "")
    for size in (2, 4, 8, 16):
        variance = gradient_variance(size, rho=rho, kappa=kappa)
        table.add_row(
            str(size),
            f"{variance:.3f}",
            f"{variance / alone:.2f}",
            f"{break_even_rho(size, kappa=kappa):.3f}",
        )
    Console().print(table)
    Console().print(
        "At a fixed budget of rollouts, to first order, in units of σ²_ε E‖∇ ln π‖² / N. Left out: that "
        "the size of ∇ ln π varies with the advantage, and that a group costs one task's prompt work."
    )
