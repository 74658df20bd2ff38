"""The decoder's norms and MLPs through torch.compile.

Knows no rows. Attention stays as it is: every number of rows in a micro-batch would be compiled anew.
Invariants: what does not compile runs as before, with a warning; probes are made without compiled code,
so that a version restores whether or not its trainer compiles.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from service import telemetry
from trainer.policy import PolicyModel, hidden_states, single_row

_COMPILED = ("MLP", "Norm")
"""Ends of the names of the classes that are compiled, as transformers names them."""


def compile_decoder(policy: PolicyModel) -> bool:
    """Compile, and try it on a few tokens; False: it does not work here, and nothing is compiled."""
    chosen = [m for m in policy.base.base_model.modules() if type(m).__name__.endswith(_COMPILED)]
    for module in chosen:
        module.compile(dynamic=True)
    try:
        torch.autograd.backward(hidden_states(policy, single_row(policy, list(range(2, 20)))).sum() * 0.0)
    except Exception as error:  # whatever compilers raise
        for module in chosen:
            module._compiled_call_impl = None  # noqa: SLF001 - the way back that torch has
        telemetry.logger().warning("not_compiled", error=type(error).__name__, detail=str(error)[:500])
        chosen = []
    policy.model.zero_grad(set_to_none=True)
    policy.compiled = bool(chosen)
    return policy.compiled


@contextmanager
def eager(policy: PolicyModel) -> Iterator[None]:
    """Run the policy without its compiled code."""
    if not policy.compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
