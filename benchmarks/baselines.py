"""Baselines on real reward tables: B_eff ratios with intervals, validity, and cost.

    python -m benchmarks.baselines [--batches 400] [--data ../shared/data/multirollout]

Three minutes of CPU time, and three more for the embeddings, which --cache FOLDER keeps. Writes
benchmarks/results/baselines.json and prints the same table. Every seed is fixed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report
from service.baselines.calibration import ReplayedBatch, replayed, scores
from service.baselines.calibration_sets import CalibrationSet, Encode, read_calibration_set
from service.baselines.effective_batch import REFERENCE, Interval, prequential_ratio
from service.baselines.embedding import Encoder
from service.baselines.estimators import Scored
from service.baselines.features import Task, task_features
from service.baselines.gaussian_process import GaussianProcess
from service.baselines.marginal_likelihood import fitted
from service.baselines.selection import AUTO, CANDIDATES, Selection, advanced, predictions

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("YORO_SHARED_DATA", ROOT.parent / "shared/data")) / "multirollout"
BATCH_SIZE, WINDOW, SEED = 32, 16, 0
TOLERANCE = 0.02
LEAST_LOWER_BOUND = 0.98
LEAST_MEAN = 1.30
KEYED = ("ema", "group_mean")
"""Best where tasks recur and nothing else tells them apart."""
WARM_UP, STEADY = 4, 8
"""Batches that are also left out of the score: a cold replay has no history at first."""


@dataclass(frozen=True)
class TableFloor:
    """A reward table and the ratio of B_eff to `leave_one_out` that `auto` has to reach."""

    file: str
    floor: float
    minimum_rewards: int = 2


FLOORS = (
    TableFloor("tau_bench_airline_gpt-4o", 1.05),
    TableFloor("rgsub12_llama-3.3-70b", 1.70),
    TableFloor("rgsub12_qwen2.5-3b", 1.40),
    TableFloor("rg_rlft_inter_algorithmic_qwen_3b_500", 1.63),
    TableFloor("labbench2_configs_gpt-5-2", 1.42, minimum_rewards=3),
    TableFloor("gsm8k_openai_4policies", 1.08),
    TableFloor("automationbench600_4policies", 1.22),
    TableFloor("smollm2_135m_reasoning_gym_local", 1.08),
)


def main() -> int:
    """Measure, print and write; exit 1 where a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=400, help="replayed batches a table, at least")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2")
    parser.add_argument("--cache", type=Path, help="folder that keeps embeddings between runs")
    chosen = parser.parse_args()
    encoder = Encoder(chosen.encoder)
    report = Report("baselines", f"python -m benchmarks.baselines --batches {chosen.batches}")
    encode = encoder.encode if chosen.cache is None else kept(encoder, chosen.cache)
    measure_tables(report, chosen.data, encode, chosen.batches)
    measure_switching(report)
    measure_cost(report, encoder)
    return int(not report.write())


def kept(encoder: Encoder, folder: Path) -> Encode:
    """An encoder that keeps the vectors of each list of texts in a file named by their hash."""

    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        digest = hashlib.sha256(json.dumps([encoder.name, *texts]).encode()).hexdigest()
        file = folder / f"{digest}.npy"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            np.save(file, encoder.encode(texts))
        vectors: NDArray[np.float32] = np.load(file)
        return vectors

    return encode


def measure_tables(report: Report, folder: Path, encode: Encode, batches: int) -> None:
    """Ratios of `auto` on every table and on average, and whether single rollouts tell the same."""
    if not folder.is_dir():
        print(f"no reward tables at {folder}: set YORO_SHARED_DATA; ratios skipped", file=sys.stderr)
        return
    cold = []
    for table in FLOORS:
        lines = (folder / f"{table.file}.jsonl").read_text(encoding="utf-8").splitlines()
        data = read_calibration_set(lines, encode, minimum_rewards=table.minimum_rewards)
        replays = -(-batches // (len(data.tasks) // BATCH_SIZE))
        stream = replayed(data, batch_size=BATCH_SIZE, window_batches=WINDOW, replays=replays, seed=SEED)
        cold.append(measure_ratios(report, table, data, list(stream)))
    report.add(
        "mean over tables, whole replays", float(np.mean([r.value for r in cold])), "ratio", LEAST_MEAN
    )
    report.add("least upper end of an interval, whole replays", min(r.high for r in cold), "ratio", 1.0)


def measure_ratios(
    report: Report, table: TableFloor, data: CalibrationSet, batches: Sequence[ReplayedBatch]
) -> Interval:
    """Whole replays, replays without their first batches, and the single-rollout estimate."""
    found = scores(data, batches, batch_size=BATCH_SIZE, seed=SEED)
    add_floor(report, f"{table.file}: whole replays", found[AUTO].ratio, table.floor)
    for first in (WARM_UP, STEADY):
        later = [batch for batch in batches if batch.number >= first]
        if later:
            without = scores(data, later, batch_size=BATCH_SIZE, seed=SEED)
            add_floor(report, f"{table.file}: from batch {first + 1} on", without[AUTO].ratio, table.floor)
            # A fixed formula has nothing to learn: what it gains here is what a cold start costs anybody.
            fixed = without["embedding_softmax"].ratio
            add_interval(report, f"{table.file}: embedding_softmax from batch {first + 1} on", fixed)
    for name in ("length_buckets", "tfidf_softmax", "embedding_softmax", "gaussian_process"):
        add_interval(report, f"{table.file}: {name}", found[name].ratio)
    single, calibrated = single_rollout_ratio(batches), found[AUTO].ratio
    add_interval(report, f"{table.file}: from single rollouts", single)
    apart = max(single.low - calibrated.high, calibrated.low - single.high, 0.0)
    report.add(f"{table.file}: gap between the two intervals", apart, "", 0.0, "less")
    return calibrated


def add_interval(report: Report, name: str, ratio: Interval, floor: float | None = None) -> None:
    """One ratio with its interval."""
    report.add(name, ratio.value, "ratio", floor, interval=(ratio.low, ratio.high))


def add_floor(report: Report, name: str, ratio: Interval, floor: float) -> None:
    """The point may lie a tolerance below the floor; the interval must not show harm."""
    add_interval(report, name, ratio, floor - TOLERANCE)
    report.add(f"{name}, lower end", ratio.low, "ratio", LEAST_LOWER_BOUND)


def single_rollout_ratio(batches: Sequence[ReplayedBatch]) -> Interval:
    """What the bake-off would say, knowing one reward a task."""

    def squared(name: str) -> np.ndarray:
        return np.array([((b.rewards - b.baselines[name]) ** 2).sum() for b in batches])

    return prequential_ratio(squared(AUTO), squared(REFERENCE), seed=SEED)


def measure_switching(report: Report, batches: int = 200, size: int = 16) -> None:
    """`auto` on a stream that changes half-way: at first words tell difficulty, then only task keys.

    In the second half every task reads the same and its forty keys recur, each with its own mean.
    """
    rng = np.random.default_rng(SEED)
    means, axes = rng.integers(2, size=40), np.linalg.qr(rng.normal(size=(384, 40)))[0].T
    state, window, wasted = Selection(), Scored([], np.zeros(0)), dict.fromkeys((*CANDIDATES, AUTO), 0.0)
    chosen = []
    for number in range(batches):
        keys = rng.permutation(40)[:size]
        told = number < batches // 2
        batch = Scored(
            [stream_task(number, k, axes[k % 4 if told else 0], recurs=not told) for k in keys.tolist()],
            (rng.random(size) < (0.1 + 0.25 * (keys % 4) if told else means[keys])).astype(np.float64),
        )
        made = predictions(state, batch, window)
        chosen.append(state.chosen)
        for name in wasted:
            used = made[state.chosen if name == AUTO else name]
            wasted[name] += float(((batch.rewards - used.values) ** 2).sum())
        state = advanced(state, made, batch, window)
        rewards = np.concatenate([window.rewards, batch.rewards])[-WINDOW * size :]
        window = Scored([*window.tasks, *batch.tasks][-WINDOW * size :], rewards)
    best = min(CANDIDATES, key=wasted.__getitem__)
    report.add(
        f"changing stream: `auto` over the best one, {best}", wasted[best] / wasted[AUTO], "ratio", 1.0
    )
    report.add("changing stream: `auto` ends with what is best then", chosen[-1] in KEYED, "", 1.0)
    switches = sum(a != b for a, b in itertools.pairwise(chosen))
    report.add("changing stream: switches of `auto`", switches, "", 3, "less")


def stream_task(number: int, key: int, axis: NDArray[np.float64], *, recurs: bool) -> Task:
    """A task whose text and embedding show its kind alone; its key recurs or is new."""
    prompt = "the same words" if recurs else f"{('add', 'draw', 'prove', 'sing')[key % 4]} this"
    features = task_features([{"role": "user", "content": prompt}], [], {})
    identity = f"{number}/{key}".encode()
    task_key = f"{key}" if recurs else f"{number}/{key}"
    return Task(features, axis.astype(np.float32), task_key, None, identity, identity, frozenset(), 0)


def measure_cost(report: Report, encoder: Encoder) -> None:
    """CPU time of the estimators on one core, embeddings and fits apart."""
    for window in (0, 4, 16, 64):
        taken = milliseconds(every_estimator(BATCH_SIZE, window * BATCH_SIZE))
        bound = 100.0 if window == WINDOW else None
        report.add(f"all estimators, B = 32, {window} batches of history", taken, "ms", bound, "less")
    for name in CANDIDATES:
        taken = milliseconds(one_estimator(name, 512, 16 * 512))
        report.add(f"{name}, B = 512, 16 batches of history", taken, "ms", 1_000.0, "less")
    history = synthetic(512, seed=2)
    report.add("fit of 512 points", milliseconds(lambda: fitted(GaussianProcess(), history)), "ms")
    texts = [task.features.text for task in synthetic(64, seed=3).tasks]
    seconds = milliseconds(lambda: encoder.encode(texts), repeats=1) / 1_000
    report.add("embedding, 1,500 characters", 64 / seconds, "texts/s")


def every_estimator(size: int, window: int) -> Callable[[], object]:
    """All candidates on one batch."""
    runs = [one_estimator(name, size, window) for name in CANDIDATES]
    return lambda: [run() for run in runs]


def one_estimator(name: str, size: int, window: int) -> Callable[[], object]:
    """One candidate on one batch; features are read once before, as history was in service."""
    batch, history = synthetic(size, seed=0), synthetic(window, seed=1)
    estimator = Selection().candidate(name)
    return lambda: estimator.predict(batch, history)


def milliseconds(run: Callable[[], object], *, repeats: int = 3) -> float:
    """Median CPU time of a run, after one that warms caches: other work on the machine is no cost."""
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(1_000 * (time.process_time() - start))
    return float(np.median(times))


def synthetic(size: int, seed: int) -> Scored:
    """Tasks of about 1,500 characters over a vocabulary of 5,000 words, with random embeddings."""
    rng = np.random.default_rng([seed, size])
    words = np.array([f"{stem}{n}" for stem in ("ka", "lo", "mi", "ne", "pu") for n in range(1_000)])
    common = (rng.zipf(1.3, (size, 220)) - 1) % len(words)
    tasks = []
    for k, picked in enumerate(common):
        features = task_features([{"role": "user", "content": " ".join(words[picked])}], [], {"tier": k % 3})
        vector = rng.normal(size=384).astype(np.float32)
        identity = f"{seed}/{k}".encode()
        tasks.append(
            Task(features, vector / np.linalg.norm(vector), f"{k}", None, identity, identity, frozenset(), 0)
        )
    return Scored(tasks, rng.integers(2, size=size).astype(np.float64))


if __name__ == "__main__":
    sys.exit(main())
