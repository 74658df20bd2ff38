"""`python -m benchmarks.guards`: how often the collapse guard is wrong, and how long it takes to be right.

Synthetic rewards of 0 and 1, a version a batch, one look a batch, at the default settings, on raw
rewards alone: the service then asks besides whether the tasks were harder, which can only stop an alarm.
`mixed` draws each task's difficulty anew, `clumped` keeps one for four rollouts in a row, as customers do:
rollouts are then not independent, which the rule takes them for. `silent` counts: a batch whose rewards
are all equal makes no step under `leave_one_out`.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report
from service.batches.collapse import LOOK_BACK, SILENT_SHARE, Drop, Sampled, greatest_drop
from service.policies import Guards

Rewards = NDArray[np.float64]
DEFAULTS = Guards()
BEFORE, AFTER = 40, 60
"""Batches before a collapse, and those in which it may be seen."""
MEANS = (0.1, 0.3, 0.6)
SIZES = (8, 32)


def stream(random: np.random.Generator, batches: int, size: int, mean: float, clump: int) -> Rewards:
    """Rewards [batches, B]; the difficulty of a task is Beta with the given mean, U-shaped."""
    difficulty = random.beta(2 * mean, 2 * (1 - mean), batches * size // clump)
    return (random.random(batches * size) < np.repeat(difficulty, clump)).reshape(batches, size) * 1.0


def looks(rewards: Rewards) -> Iterator[Drop | None]:
    """What the guard decides after each batch: a drop that counts as a collapse, or None."""
    everyone = [
        Sampled(number, number, len(row), float(row.sum()), float((row**2).sum()))
        for number, row in enumerate(rewards)
    ]
    silent = rewards.std(axis=1) == 0
    last = DEFAULTS.silent_batches or 1
    for end in range(1, len(rewards) + 1):
        drop = greatest_drop(everyone[max(0, end - LOOK_BACK) : end], DEFAULTS.collapse_share)
        share = SILENT_SHARE if silent[max(0, end - last) : end].sum() == last else 1.0
        wanted = DEFAULTS.collapse_deviations * share
        yield drop if drop is not None and drop.deviations >= wanted else None


def false_alarms(random: np.random.Generator, count: int, **shape: Any) -> int:
    """Streams of 100 batches without any change in which the guard would have acted."""
    return sum(any(looks(stream(random, 100, **shape))) for _ in range(count))


def delay(random: np.random.Generator, count: int, left: float, **shape: Any) -> float:
    """Median batches from the collapse to the alarm; `left` of the successes stay."""
    found = []
    for _ in range(count):
        rewards = stream(random, BEFORE + AFTER, **shape)
        rewards[BEFORE:] *= random.random(rewards[BEFORE:].shape) < left
        after = list(looks(rewards))[BEFORE:]
        found.append(next((n for n, drop in enumerate(after, 1) if drop), AFTER + 1))
    return float(np.median(found))


def main() -> None:
    """Measure, print, write benchmarks/results/guards.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=100, help="streams of each kind")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    random = np.random.default_rng(wanted.seed)
    report = Report("guards", " ".join(["python -m benchmarks.guards", *sys.argv[1:]]))
    wrong = {"mixed": 0, "clumped": 0}
    for size in SIZES:
        for mean in MEANS:
            for kind, clump in (("mixed", 1), ("clumped", 4)):
                shape = {"size": size, "mean": mean, "clump": clump}
                wrong[kind] += false_alarms(random, wanted.streams, **shape)
            shape = {"size": size, "mean": mean, "clump": 1}
            for left, words in ((0.0, "to 0"), (1 / 3, "to a third")):
                found = delay(random, max(10, wanted.streams // 5), left, **shape)
                report.add(f"B = {size}, mean reward {mean} {words}: median delay", found, "batches")
    looked = wanted.streams * 100 * len(SIZES) * len(MEANS)
    for kind, alarms in wrong.items():
        bound = 1.0 if kind == "mixed" else None
        report.add(
            f"false alarms, {kind} tasks, {looked:,} looks",
            alarms / looked * 1e4,
            "/10k looks",
            bound,
            "less",
        )
    sys.exit(0 if report.write() else 1)


if __name__ == "__main__":
    main()
