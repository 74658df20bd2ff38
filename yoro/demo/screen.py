"""What a person sees of the demo: one live block, and a table at the end."""

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 40


class Screen:
    """Progress while the demo runs; plain lines where no terminal listens."""

    def __init__(self, console: Console, steps: int) -> None:
        """Start the live block."""
        self._console = console
        self._progress = Progress(
            TextColumn("versions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._progress.add_task("versions", total=steps)
        self._rewards: list[float] = []
        self._head = -1
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        if console.is_terminal:
            self._live.start()

    def say(self, line: str) -> None:
        """Print one line above the live block."""
        self._console.print(line)

    def show(self, status: dict[str, Any], mean_reward: float | None) -> None:
        """Show the newest status and the mean of the newest rewards."""
        head = status["head_version"]
        self._progress.update(self._task, completed=head)
        if head != self._head:
            self._note_version(head, status)
        if self._console.is_terminal:
            self._live.update(self._block(status, mean_reward))

    def close(self) -> None:
        """Leave the last block standing."""
        self._live.stop()

    @staticmethod
    def table(console: Console, report: dict[str, Any], *, improved: bool) -> None:
        """Print what was measured, improved or not."""
        table = Table("measured", "value", title="yoro demo")
        error = report["difference_standard_error"]
        ratio = report["b_eff_ratio"]
        table.add_row(
            f"score on {report['held_out_tasks']} held-out tasks, before", f"{report['held_out_before']:.3f}"
        )
        table.add_row("the same tasks, after", f"{report['held_out_after']:.3f}")
        table.add_row(
            "paired difference",
            f"{report['difference']:+.3f} ± {error:.3f} (standard error): "
            + ("improved" if improved else "no improvement beyond 2 standard errors"),
        )
        table.add_row("versions published", str(report["versions"]))
        table.add_row("rollouts trained, each once", str(report["rollouts_trained"]))
        table.add_row("B_eff, baseline in use over batch mean", "–" if ratio is None else f"{ratio:.2f}")
        table.add_row("seconds, start to end", f"{report['seconds']:.0f}")
        console.print(table)

    def _note_version(self, head: int, status: dict[str, Any]) -> None:
        self._head = head
        step = status["last_step"] or {}
        reward = step.get("reward/mean")
        if reward is None:
            return
        self._rewards.append(reward)
        if not self._console.is_terminal:
            self._console.print(
                f"version {head}: mean reward {reward:.3f}, {step.get('seconds', 0.0):.1f} s of training"
            )

    def _block(self, status: dict[str, Any], mean_reward: float | None) -> Group:
        counts, following = status["rollouts"], status["next_batch"]
        newest = "–" if mean_reward is None else f"{mean_reward:.3f}"
        lines = [
            f"reward a batch  {_sparkline(self._rewards[-_HISTORY:])}  newest rollouts {newest}",
            "rollouts        " + ", ".join(f"{count} {state}" for state, count in counts.items()),
            f"next batch      {following['blocked_by'] or 'forming'}",
            f"trainer         {status['trainer']['state']}",
        ]
        return Group(self._progress, *(Text(line) for line in lines))


def _sparkline(values: list[float]) -> str:
    """Draw values in [0, 1] as bars, scaled to their own range."""
    if not values:
        return "(no batch yet)"
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    bars = "".join(_BARS[1 + round((value - low) / span * (len(_BARS) - 2))] for value in values)
    return f"{bars} {values[-1]:.3f}"
