"""What was tried to make the default baseline better: every idea on equal streams, failures included.

    python -m benchmarks.baseline_study [--batches 40] [--tables llama,mix_u] [--cache FOLDER]

Ratio of B_eff to `leave_one_out`, cold replays, B = 32, window 16. Ideas are compared in pairs: the same
permutations, the same rewards. Ideas were developed on qwen, gsm8k, smollm2 and the mixes; the other
tables confirm. Writes benchmarks/results/baseline_study.json and prints the same table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.baselines import BATCH_SIZE, DATA, SEED, WINDOW, kept
from benchmarks.report import Report
from benchmarks.study.contenders import FAMILY_MEANS, SERVED, Contender, Kernels, whole_table
from benchmarks.study.ideas import ideas, kernels
from benchmarks.study.tables import NAMES, SHORT, Grouped, table
from service.baselines.effective_batch import within_task_variance
from service.baselines.embedding import Encoder
from service.baselines.linear import PRIOR_REWARD
from service.baselines.marginal_likelihood import FIT_POINTS

Array = NDArray[np.float64]
MEAN = "mean of the eight"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=40, help="replayed batches a table, at least")
    parser.add_argument("--tables", default=",".join(NAMES))
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2")
    parser.add_argument("--cache", type=Path, help="folder that keeps embeddings between runs")
    chosen = parser.parse_args()
    encoder = Encoder(chosen.encoder)
    encode = encoder.encode if chosen.cache is None else kept(encoder, chosen.cache)
    report = Report("baseline_study", f"python -m benchmarks.baseline_study --batches {chosen.batches}")
    ratios: dict[str, dict[str, float]] = {}
    for name in chosen.tables.split(","):
        ratios[name] = compared(table(name, chosen.data, encode), chosen.batches)
        for idea, ratio in ratios[name].items():
            report.add(f"{name}: {idea}", ratio, "ratio")
    if set(SHORT) <= set(ratios):
        ratios[MEAN] = {
            idea: float(np.mean([ratios[name][idea] for name in SHORT])) for idea in ratios[SHORT[0]]
        }
        for idea, ratio in ratios[MEAN].items():
            report.add(f"{MEAN}: {idea}", ratio, "ratio")
    report.write()
    show(ratios)


def compared(subject: Grouped, batches: int) -> dict[str, float]:
    """Ratio of each idea on one table."""
    rng, data = np.random.default_rng(SEED), subject.data
    a_replay = len(data.tasks) // BATCH_SIZE
    candidates = ideas(oracle(subject))
    totals = {idea.name: 0.0 for idea in candidates}
    reference = within = 0.0
    for _ in range(-(-batches // a_replay)):
        order = rng.permutation(len(data.tasks))
        rewards = np.array([rng.choice(task_rewards) for task_rewards in data.rewards])
        contenders = {idea.name: idea.make() for idea in candidates}
        for number in range(a_replay):
            wasted = batch_errors(subject, order, rewards, number, contenders)
            reference += wasted.pop("leave_one_out")
            within += wasted.pop("within")
            for name, error in wasted.items():
                totals[name] += error
    return {name: (within + reference) / (within + error) for name, error in totals.items()}


def batch_errors(
    subject: Grouped,
    order: NDArray[np.intp],
    rewards: Array,
    number: int,
    contenders: Mapping[str, Contender],
) -> dict[str, float]:
    """Summed error of every contender against the unused rewards, less their noise; then they learn."""
    data, start = subject.data, number * BATCH_SIZE
    members = order[start : start + BATCH_SIZE]
    earlier = order[max(0, start - WINDOW * BATCH_SIZE) : start]
    counts = np.array([len(data.rewards[k]) for k in members])
    totals = np.array([data.rewards[k].sum() for k in members])
    spread = within_task_variance([data.rewards[k] for k in members])
    unused = (totals - rewards[members]) / (counts - 1) - PRIOR_REWARD
    seen, residuals = scene(subject, rewards, np.concatenate([members, earlier]), earlier)
    mine = residuals[:BATCH_SIZE]
    made = {
        name: contender.predict(seen, residuals, BATCH_SIZE) for name, contender in contenders.items()
    } | {"leave_one_out": (mine.sum() - mine) / (BATCH_SIZE - 1)}
    errors = {n: float((((b - unused) ** 2) - spread / (counts - 1)).sum()) for n, b in made.items()}
    window = np.concatenate([earlier, members])[-FIT_POINTS:]
    known, past = scene(subject, rewards, window, window)
    for contender in contenders.values():
        contender.learn(known, past, number + 1)
    return errors | {"within": float(spread.sum())}


def scene(
    subject: Grouped,
    rewards: Array,
    points: NDArray[np.intp],
    fitted_on: NDArray[np.intp],
) -> tuple[Kernels, Array]:
    """Kernels of these points and their rewards less the prior mean."""
    tasks, earlier = ([subject.data.tasks[k] for k in each.tolist()] for each in (points, fitted_on))
    known = np.array([subject.means[task.task_key] for task in tasks]) - PRIOR_REWARD
    return {**kernels(tasks, earlier, subject.family), FAMILY_MEANS: known}, rewards[points] - PRIOR_REWARD


def oracle(subject: Grouped) -> dict[str, float]:
    """Amplitudes fitted to one reward of up to 512 tasks of the table."""
    rng, data = np.random.default_rng(SEED), subject.data
    points = rng.permutation(len(data.tasks))[:FIT_POINTS]
    rewards = np.array([rng.choice(task_rewards) for task_rewards in data.rewards])
    return whole_table(SERVED, *scene(subject, rewards, points, points))


def show(ratios: Mapping[str, Mapping[str, float]]) -> None:
    """One row an idea; what is not `kept` shows its difference to it."""
    shown = Table("idea", *ratios)
    for idea in next(iter(ratios.values())):
        cells = [
            f"{row[idea]:.3f}" if idea == "kept" else f"{row[idea] - row['kept']:+.3f}"
            for row in ratios.values()
        ]
        shown.add_row(idea, *cells)
    Console(width=220, file=sys.stdout).print(shown)


if __name__ == "__main__":
    main()
