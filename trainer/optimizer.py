"""AdamW over the LoRA's parameters, one step a batch.

Knows neither objective nor files. Invariants: the learning rate is a function of the step's number
alone; a gradient that is not finite never steps; state goes in and out by parameter name, so that
no order of parameters is ever relied on.
"""

from collections.abc import Mapping

import torch

from service.errors import AdapterRejected, TrainingFailed
from service.policies import Optimizer

_STATE = ("exp_avg", "exp_avg_sq", "step")


class AdapterOptimizer:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with warm-up and clipping."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], settings: Optimizer) -> None:
        """Take the trainable parameters by name; raises TrainingFailed when there are none."""
        if not parameters or not all(p.requires_grad for p in parameters.values()):
            raise TrainingFailed("the optimizer has no trainable parameters", code="nothing_trainable")
        self.parameters = dict(parameters)
        self._settings = settings
        self._adamw = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            foreach=False,
        )

    def use(self, settings: Optimizer) -> None:
        """Take other settings from the next step on; the state stays."""
        self._settings = settings
        for group in self._adamw.param_groups:
            group["betas"], group["eps"] = settings.betas, settings.epsilon
            group["weight_decay"] = settings.weight_decay

    def learning_rate(self, step_number: int) -> float:
        """The rate of step 1, 2, ...: linear over `warmup_steps`, then constant."""
        warmup = max(1, self._settings.warmup_steps)
        return self._settings.learning_rate * min(1.0, max(1, step_number) / warmup)

    def zero_grad(self) -> None:
        """Forget gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self, step_number: int) -> float:
        """Clip, step, forget the gradients; return the norm before clipping.

        Raises TrainingFailed, with parameters and state untouched, when the norm is not finite.
        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not torch.tensor(norm).isfinite():
            self.zero_grad()
            raise TrainingFailed("the gradient is not finite", code="non_finite_gradient")
        if norm > self._settings.clip_norm:
            for gradient in gradients:
                gradient.mul_(self._settings.clip_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(step_number)
        self._adamw.step()
        self.zero_grad()
        return norm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state as `{parameter}.{exp_avg|exp_avg_sq|step}`; empty before the first step."""
        return {
            f"{name}.{key}": self._adamw.state[parameter][key].detach().cpu()
            for name, parameter in self.parameters.items()
            if parameter in self._adamw.state
            for key in _STATE
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state; raises AdapterRejected when names or shapes disagree.

        An empty state is that of a policy's first step.
        """
        expected = {f"{name}.{key}" for name in self.parameters for key in _STATE}
        if state and set(state) != expected:
            wrong = sorted(set(state) ^ expected)[:3]
            raise AdapterRejected(f"optimizer state disagrees at {wrong}", code="optimizer_keys")
        loaded: dict[torch.Tensor, dict[str, torch.Tensor]] = {
            parameter: {key: _placed(name, key, state[f"{name}.{key}"], parameter) for key in _STATE}
            for name, parameter in (self.parameters.items() if state else ())
        }
        self._adamw.state.clear()
        self._adamw.state.update(loaded)


def _placed(name: str, key: str, value: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    # AdamW keeps its count on the CPU.
    shape, device = ((), "cpu") if key == "step" else (parameter.shape, parameter.device)
    if value.shape != torch.Size(shape):
        raise AdapterRejected(f"optimizer state of {name} has a wrong shape", code="optimizer_shape")
    return value.to(device=device, dtype=torch.float32, copy=True)
