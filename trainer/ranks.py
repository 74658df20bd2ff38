"""Several processes that make one step together, over torch.distributed; or one that is alone.

Knows neither rows nor objective nor database. Every rank calls the same methods in the same order: a rank
that fails within `agree` says so instead of leaving, so that all of them see the same outcome. Invariants:
gradients are summed, never averaged, since denominators are fixed beforehand; a rank that ends or hangs
ends the others with RankLost, after `YORO_RANK_SECONDS` at the latest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from service.errors import RankLost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `size`; rank 0 is the one that knows the database."""

    rank: int = 0
    size: int = 1

    def share(self, work: Sequence[T]) -> list[T]:
        """This rank's part: every `size`-th, so that neighbours in a sorted plan go to different ranks."""
        return list(work[self.rank :: self.size])

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Do this rank's work; return every rank's result, or raise the same on all of them.

        Raises torch.OutOfMemoryError if any rank ran out of memory, else RuntimeError if any failed.
        """
        if self.size == 1:
            return [work()]
        outcomes = self.gather(_outcome(work))
        for rank, outcome in enumerate(outcomes):
            if outcome.failure == "memory":
                raise torch.OutOfMemoryError(f"rank {rank}: {outcome.detail}")
        for rank, outcome in enumerate(outcomes):
            if outcome.failure:
                raise RuntimeError(f"rank {rank}: {outcome.detail}")
        return [outcome.value for outcome in outcomes]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks."""
        found: list[Any] = [None] * self.size
        with _lost():
            dist.all_gather_object(found, value)
        return found

    def tell(self, value: Any = None) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        if self.size > 1:
            with _lost():
                dist.broadcast_object_list(box, src=0)
        return box[0]

    def sum_gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Add the gradients of all ranks up, in place; a rank without one counts as zero."""
        if self.size == 1:
            return
        together = _flat([p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters.values()])
        with _lost():
            dist.all_reduce(together, op=dist.ReduceOp.SUM)
        for parameter, gradient in zip(parameters.values(), _parts(together, parameters), strict=True):
            parameter.grad = gradient.clone()

    def take_parameters(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Overwrite the parameters with rank 0's."""
        if self.size == 1:
            return
        together = _flat([p.detach() for p in parameters.values()])
        with _lost():
            dist.broadcast(together, src=0)
        with torch.no_grad():
            for parameter, value in zip(parameters.values(), _parts(together, parameters), strict=True):
                parameter.copy_(value)


ALONE = Ranks()


def launched() -> bool:
    """Tell whether torchrun or `accelerate launch` started this process as one of several."""
    return dist.is_torchelastic_launched()


@contextmanager
def joined(seconds: float) -> Iterator[Ranks]:
    """Be one of the ranks while the block runs: gloo between CPUs, NCCL between GPUs."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    with _lost():
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    yield Ranks(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()  # not after an error: it would wait for the others


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any
    failure: Literal["", "memory", "error"] = ""
    detail: str = ""


def _outcome(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(work())
    except torch.OutOfMemoryError as error:
        return _Outcome(None, "memory", str(error))
    except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
        return _Outcome(None, "error", f"{type(error).__name__}: {error}")


@contextmanager
def _lost() -> Iterator[None]:
    # What torch raises when a peer is gone or late is a RuntimeError, as are a step's own failures.
    try:
        yield
    except RuntimeError as error:
        raise RankLost(str(error).splitlines()[0]) from error


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _parts(together: torch.Tensor, parameters: Mapping[str, torch.nn.Parameter]) -> list[torch.Tensor]:
    sizes = [p.numel() for p in parameters.values()]
    pieces = torch.split(together, sizes)
    return [piece.view_as(p) for piece, p in zip(pieces, parameters.values(), strict=True)]
