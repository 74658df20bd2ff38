"""One trainer in several processes: rank 0 holds the lease, every rank shares the rows of each step.

    rank 0   claim ─> restore ─> rows ─> order ─┐               ┌─> files ─> verify, probe ─> commit
    others                           wait ──────┴─> step of all ┴─> wait

Only rank 0 knows database, store and publishing. Invariants: adapter and optimizer state of every rank are
rank 0's before each step, so that what another rank holds never counts; whatever a step raises is raised on
all ranks; a rank that is gone ends all of them (RankLost), and the launcher starts them again, which is
harmless at any point (lifecycle.md). A lease that is lost is found by rank 0's next transaction; the others
then wait for its next order.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.device_mesh import DeviceMesh

from service.errors import TrainingFailed
from service.policies import PolicySettings
from service.settings import Settings
from trainer import step
from trainer.checkpoint import WEIGHTS
from trainer.optimizer import AdapterOptimizer
from trainer.policy import PolicyModel
from trainer.ranks import ALONE, Ranks, joined, launched
from trainer.restore import Restorer
from trainer.scoring import missing_versions
from trainer.sharding import announce, idle_pass, mesh_of, shard
from trainer.step import StepResult, TrainingBatch


@dataclass(frozen=True, slots=True)
class _Order:
    """What every rank needs for a step; `adapters` has the weights file of versions to score, None: base."""

    batch: TrainingBatch
    settings: PolicySettings
    step_number: int
    adapters: dict[int, bytes | None]


@dataclass(frozen=True, slots=True)
class _Pass:
    """Rank 0 runs a model on its own whose base is split: run along."""

    settings: PolicySettings
    grad: bool


_WAIT, _STOP = "wait", "stop"


@dataclass(slots=True, eq=False)
class Team:
    """The ranks as the worker sees them; `mesh` where the base is split over them."""

    ranks: Ranks = ALONE
    mesh: DeviceMesh | None = None
    _together: bool = False
    """All ranks are in a step, whose passes they all know of."""

    def prepare(self, policy: PolicyModel, settings: PolicySettings) -> None:
        """Split a base model that was loaded, and let rank 0 announce what it runs on its own."""
        assert self.mesh is not None
        shard(policy, self.mesh)
        if self.ranks.rank == 0:
            announce(policy, lambda grad: self._ask_along(_Pass(settings, grad)))

    def _ask_along(self, order: _Pass) -> None:
        if not self._together:
            self.ranks.tell(order)

    def wait(self) -> None:
        """Tell the others, at least every `YORO_RANK_SECONDS`, that there is nothing to do yet."""
        if self.ranks.size > 1:
            self.ranks.tell(_WAIT)

    def dismiss(self) -> None:
        """Tell the others to end."""
        if self.ranks.size > 1:
            self.ranks.tell(_STOP)

    def train_batch(
        self,
        policy: PolicyModel,
        optimizer: AdapterOptimizer,
        batch: TrainingBatch,
        settings: PolicySettings,
        *,
        step_number: int,
        load_version: Callable[[int], Path | None],
        advance: Callable[[int, int, int], None],
    ) -> StepResult:
        """Make the step with all ranks; as `trainer.step.train_batch`, called by rank 0."""
        if self.ranks.size > 1:
            adapters = _adapters(batch, load_version)
            self.ranks.tell(_Order(batch, settings, step_number, adapters))
            _take_state(self.ranks, policy, optimizer)
        self._together = True
        try:
            return step.train_batch(
                policy, optimizer, batch, settings,
                step_number=step_number, load_version=load_version, advance=advance, ranks=self.ranks,
            )  # fmt: skip
        finally:
            self._together = False


SOLO = Team()


@contextmanager
def joined_team(settings: Settings) -> Iterator[Team]:
    """Be one of the processes that a launcher started, or alone where none did."""
    if not launched():
        yield SOLO
        return
    with joined(settings.rank_seconds) as ranks:
        yield Team(ranks, mesh_of(ranks) if settings.shard_base else None)


def follow(ranks: Ranks, restorer: Restorer) -> None:
    """Be a rank other than 0: make the steps that rank 0 orders until it dismisses. Raises RankLost."""
    # A launcher signals all ranks; only rank 0 knows when a step may end.
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.SIG_IGN)
    while (order := ranks.tell()) != _STOP:
        if order == _WAIT:
            continue
        if isinstance(order, _Pass):
            idle_pass(restorer.base(order.settings), grad=order.grad)
            continue
        try:
            _obey(ranks, restorer, order)
        except TrainingFailed:
            continue  # rank 0 raises the same, and counts it


def _obey(ranks: Ranks, restorer: Restorer, order: _Order) -> None:
    policy = restorer.base(order.settings)
    optimizer = AdapterOptimizer(policy.parameters(), order.settings.optimizer)
    _take_state(ranks, policy, optimizer)
    with TemporaryDirectory(prefix="yoro-versions-") as scratch:
        folders = {v: _unpacked(Path(scratch, str(v)), body) for v, body in order.adapters.items()}
        step.train_batch(
            policy, optimizer, order.batch, order.settings,
            step_number=order.step_number, load_version=folders.__getitem__, ranks=ranks,
        )  # fmt: skip


def _take_state(ranks: Ranks, policy: PolicyModel, optimizer: AdapterOptimizer) -> None:
    """Make adapter and optimizer state rank 0's."""
    ranks.take_parameters(policy.parameters())
    optimizer.load_state_dict(ranks.tell(optimizer.state_dict()))


def _adapters(batch: TrainingBatch, load_version: Callable[[int], Path | None]) -> dict[int, bytes | None]:
    members = [r for r in batch.rollouts if r.rows.verdict != "untrainable"]
    wanted = missing_versions([r.rows for r in members], [r.version_is_head for r in members])
    folders = {version: load_version(version) for version in wanted}
    return {v: None if folder is None else (folder / WEIGHTS).read_bytes() for v, folder in folders.items()}


def _unpacked(folder: Path, body: bytes | None) -> Path | None:
    if body is None:
        return None
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(body)
    return folder
