"""Figures of a benchmark: printed as a table, written to benchmarks/results/NAME.json.

Knows nothing of what is measured. The file's shape is design/architecture.md's.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; `bound` None: reported, not judged."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    better: Literal["more", "less"] = "more"
    interval: tuple[float, float] | None = None
    """95 %, for information: bounds judge the value."""

    @property
    def holds(self) -> bool | None:
        """Tell whether the value is on the right side of its bound."""
        if self.bound is None:
            return None
        return self.value >= self.bound if self.better == "more" else self.value <= self.bound


@dataclass(slots=True)
class Report:
    """The figures of one run."""

    name: str
    command: str
    figures: list[Figure] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        bound: float | None = None,
        better: Literal["more", "less"] = "more",
        *,
        interval: tuple[float, float] | None = None,
    ) -> None:
        """Add a figure and print it at once."""
        figure = Figure(name, value, unit, bound, better, interval)
        self.figures.append(figure)
        print(_line(figure), flush=True)

    def write(self) -> bool:
        """Write the file; tell whether every judged figure holds."""
        RESULTS.mkdir(exist_ok=True)
        document = {
            "command": self.command,
            "commit": _commit(),
            "figures": [
                {"name": f.name, "value": f.value, "unit": f.unit, "bound": f.bound, "holds": f.holds}
                | ({} if f.interval is None else {"interval": f.interval})
                for f in self.figures
            ],
        }
        (RESULTS / f"{self.name}.json").write_text(json.dumps(document, indent=2) + "\n")
        return all(figure.holds is not False for figure in self.figures)


def _line(figure: Figure) -> str:
    verdict = {True: "holds", False: "falls short", None: ""}[figure.holds]
    sign = "≥" if figure.better == "more" else "≤"
    bound = "" if figure.bound is None else f"{sign} {figure.bound:g}"
    span = "" if figure.interval is None else f"[{figure.interval[0]:.3f}, {figure.interval[1]:.3f}]"
    line = f"{figure.name:<64} {figure.value:>12,.3f} {figure.unit:<10} {span:<16} {bound:<10} {verdict}"
    return line.rstrip()


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(
        ["git", "status", "--porcelain"], capture_output=True, text=True, check=False
    ).stdout
    return done.stdout.strip() + ("-dirty" if dirty else "")


def fail(message: str) -> None:
    """End the benchmark: it could not measure."""
    sys.exit(message)
