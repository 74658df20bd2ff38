"""What the trainer is at, for a person who watches it: one line that keeps itself up to date.

Knows no model and no database. The worker sets the fields; nothing is drawn unless `shown` is entered,
which is for terminals: elsewhere the log's lines say the same.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR = 20
REFRESHES = 4
"""A second."""


@dataclass(slots=True)
class Progress:
    """State, policy and batch in hand; how far the step is; what the last one showed."""

    activity: str = "waiting for a batch"
    policy: str = ""
    batch: int = 0
    rows: int = 0
    """Of the batch; 0: not known yet."""
    rows_done: int = 0
    tokens_done: int = 0
    """Sampled tokens whose gradient is in."""
    last: str = ""
    _since: float = field(default_factory=time.monotonic)

    def start(self, policy: str, batch: int) -> None:
        """Take up a batch."""
        self.policy, self.batch = policy, batch
        self.rows = self.rows_done = self.tokens_done = 0
        self._since = time.monotonic()

    def advance(self, rows: int, done: int, tokens: int) -> None:
        """Say how many of the batch's rows, and sampled tokens, the gradient holds."""
        self.rows, self.rows_done, self.tokens_done = rows, done, tokens

    def finish(self, outcome: str, reward: float | None, kl: float | None, seconds: float | None) -> None:
        """Keep what a batch came to, until the next one does."""
        parts = [f"batch {self.batch}: {outcome}"]
        parts += [] if reward is None else [f"reward {reward:.3f}"]
        parts += [] if kl is None else [f"KL {kl:.2g}"]
        parts += [] if seconds is None else [f"{seconds:.1f} s"]
        self.last = ", ".join(parts)
        self.idle()

    def idle(self) -> None:
        """Have nothing in hand."""
        self.activity, self.batch = "waiting for a batch", 0

    def __rich__(self) -> Table:
        """Draw the line."""
        line = Table.grid(padding=(0, 2))
        cells: list[Text | ProgressBar] = [Text(self.activity, style="bold")]
        if self.batch:
            cells.append(Text(f"{self.policy} batch {self.batch}", style="cyan"))
        if self.batch and self.rows:
            cells.append(ProgressBar(total=self.rows, completed=self.rows_done, width=BAR))
            cells.append(Text(f"{self.rows_done}/{self.rows} rows, {self.tokens_done:,} tokens"))
        if self.batch:
            cells.append(Text(f"{time.monotonic() - self._since:.0f} s"))
        if self.last:
            cells.append(
                Text(f"[last] {self.policy} {self.last}", style="dim", no_wrap=True, overflow="ellipsis")
            )
        line.add_row(*cells)
        return line

    @contextmanager
    def shown(self, console: Console) -> Iterator[None]:
        """Keep the line at the foot of a terminal while the block runs; logs scroll above it."""
        with Live(self, console=console, refresh_per_second=REFRESHES, transient=True):
            yield
