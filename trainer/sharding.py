"""A frozen base that is split over all ranks (FSDP2), for bases that do not fit on one device.

Knows ranks and the model, no rows. Only the decoder's blocks are split; embeddings, output layer and the LoRA
are whole on every rank. A block's weights are collected for its forward and its backward pass, so that
**every rank makes the same passes in the same order**: a rank that has no micro-batch left makes an idle one,
and what rank 0 runs on its own (probes, dry runs) is announced, so that the others run along.

FSDP2: torch.distributed.fsdp.fully_shard. A rank that runs out of memory within a pass leaves the others
waiting, and all of them end after `YORO_RANK_SECONDS`: with a split base the token budget is not halved.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer.policy import PolicyModel, hidden_states, single_row
from trainer.ranks import Ranks


def mesh_of(ranks: Ranks) -> DeviceMesh:
    """Make the mesh of all ranks; all of them call it, once."""
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (ranks.size,))


def shard(policy: PolicyModel, mesh: DeviceMesh) -> None:
    """Split the base's blocks over the mesh, in place; a base that was loaded on the CPU moves to it."""
    adapter = set(policy.parameters().values())
    blocks = set(policy.base._no_split_modules or ())  # noqa: SLF001 - transformers' name for it
    for module in policy.base.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, ignored_params=adapter & set(module.parameters()))
    policy.sharded = True
    if mesh.device_type == "cuda":
        policy.device = torch.device("cuda", torch.cuda.current_device())
        policy.model.to(policy.device)
        policy.kept_tokens = 0  # memory is what is short: always recompute activations


def announce(policy: PolicyModel, tell: Callable[[bool], None]) -> None:
    """Call `tell(grad)` before every forward pass of the base, as long as the policy is in use."""

    def before(*_: Any) -> None:
        tell(torch.is_grad_enabled())

    policy.base.base_model.register_forward_pre_hook(before)


def idle_pass(policy: PolicyModel, *, grad: bool) -> None:
    """Run along: a forward pass over two tokens and, with `grad`, a backward pass that adds nothing."""
    with torch.set_grad_enabled(grad):
        states = hidden_states(policy, single_row(policy, [0, 0]))
        if grad:
            torch.autograd.backward(states.sum() * 0.0)


def run_along(policy: PolicyModel, ranks: Ranks, plan: Sequence[Any], *, grad: bool) -> None:
    """Make the passes that this rank lacks of a plan shared out by `Ranks.share`."""
    if policy.sharded:
        for _ in range(-(-len(plan) // ranks.size) - len(ranks.share(plan))):
            idle_pass(policy, grad=grad)
