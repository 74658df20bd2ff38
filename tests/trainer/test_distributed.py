"""Two gloo processes make the gradient of one, whatever the plan, and agree on what went wrong."""

from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from service.errors import TrainingFailed
from service.policies import BaseModelSource, PolicySettings
from tests.faults.worker_process import Place, context
from tests.trainer.batches import TINY, distance, gradient, random_batch, shake, with_objective
from tests.trainer.test_step import Memory
from trainer.checkpoint import save_adapter
from trainer.policy import PolicyModel, load_policy
from trainer.ranks import joined
from yoro.ports import free_port

CASES: dict[str, dict[str, Any]] = {
    "gated": {"gate_delta": 0.15, "reference_kl": 0.2},
    "k1": {"gate": "none", "reference_kl": 0.5, "reference_kl_estimator": "k1_in_reward"},
    "token_mean": {"gate": "none", "aggregation": "token_mean"},
    "one_micro_batch": {"gate": "none"},
    "memory_of_rank_1": {"gate": "none"},
}


def settings_of(case: str) -> PolicySettings:
    budget = 8192 if case == "one_micro_batch" else 64
    sequences = TINY.sequences.model_copy(update={"token_budget": budget})
    return with_objective(**CASES[case]).model_copy(update={"sequences": sequences})


def loaded(source: BaseModelSource) -> PolicyModel:
    policy = load_policy(source, TINY, device="cpu")
    shake(policy)
    return policy


def batch_of(case: str) -> Any:
    """Half the members without logprobs, sampled by version 1: these are recomputed, shared out too."""
    batch = random_batch(1, 12)
    if case == "token_mean":
        for member in batch.rollouts[::2]:
            member.rows.rows[0].sampler_logprobs.fill_(torch.nan)
            object.__setattr__(member, "version_is_head", False)
            object.__setattr__(member.rows, "versions", (1,))
    return batch


def be_rank(place: Place, source: BaseModelSource, version: Path, out: Path) -> None:
    """Make every case's gradient and leave it in a file; then fail on rank 1 alone."""
    torch.set_num_threads(1)
    place.enter()
    with joined(30) as ranks:
        for case in CASES:
            policy = loaded(source)
            if case == "memory_of_rank_1" and place.rank == 1:
                Memory(policy, 40)
            found, result = gradient(
                policy, batch_of(case), settings_of(case), load_version=lambda _: version, ranks=ranks
            )
            torch.save((found, result.gated_out, result.metrics), out / f"{case}-{place.rank}.pt")
        policy = loaded(source)
        if place.rank == 1:
            Memory(policy, 3)
        with pytest.raises(TrainingFailed) as failure:
            gradient(policy, batch_of("gated"), settings_of("gated"), ranks=ranks)
        assert failure.value.code == "out_of_memory"


@pytest.fixture(scope="module")
def made(
    tiny_source: BaseModelSource, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[int], Path]]:
    """The folder of what both ranks found, and where version 1 lies."""
    out, version = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("v1")
    policy = loaded(tiny_source)
    shake(policy, seed=8)
    save_adapter(policy, version, "tiny", None)
    port = free_port()
    ranks: list[BaseProcess] = [
        context().Process(target=be_rank, args=(Place(rank, 2, port), tiny_source, version, out), daemon=True)
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    return out, lambda _: version


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_gradient_of_one(
    case: str, made: tuple[Path, Callable[[int], Path]], tiny_source: BaseModelSource
) -> None:
    out, load_version = made
    expected, result = gradient(
        loaded(tiny_source), batch_of(case), settings_of(case), load_version=load_version
    )
    assert result.outcome == "stepped"
    (first, gated_out, metrics), (second, *_) = (torch.load(out / f"{case}-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert distance(first, expected) < 1e-5
    assert sorted(gated_out) == sorted(result.gated_out)
    for name in ("n_tokens", "entropy", "is/mean", "grad_norm"):
        assert metrics[name] == pytest.approx(result.metrics[name], rel=1e-4)
    if case == "gated":
        assert 0 < len(gated_out) < 12
