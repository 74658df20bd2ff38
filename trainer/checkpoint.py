"""A version's files: a stock PEFT adapter, and the optimizer's state beside it.

Knows no database, store or manifest; whoever publishes makes the files durable. Invariants: the
files name no path of this machine; same weights, same bytes; loading changes weights in place, so
that the optimizer's state stays with its parameters.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from service.errors import AdapterRejected
from trainer.optimizer import AdapterOptimizer
from trainer.policy import PolicyModel, initialise

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"


def save_adapter(policy: PolicyModel, folder: Path, base_name: str, base_revision: str | None) -> list[str]:
    """Write weights and config as `PeftModel.from_pretrained` reads them; return the file names.

    `base_name` is the base model's logical name.
    """
    weights = {name: p.detach().cpu().contiguous() for name, p in policy.parameters().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = _config(policy, base_name, base_revision)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return [WEIGHTS, CONFIG]


def _config(policy: PolicyModel, base_name: str, base_revision: str | None) -> dict[str, Any]:
    config = policy.model.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": base_name,
        "revision": base_revision,
        "inference_mode": True,
        "target_modules": _targets(policy),
    }
    return {key: sorted(v) if isinstance(v, set) else v for key, v in config.items()}


def _targets(policy: PolicyModel) -> list[str]:
    """The adapted modules, by their last names where those say exactly these, as servers expect."""
    modules = dict(policy.base.named_modules())
    adapted = {name for name, module in modules.items() if isinstance(module, LoraLayer)}
    short = {name.rpartition(".")[2] for name in adapted}
    alike = {name for name in modules if name.rpartition(".")[2] in short}
    return sorted(short if alike == adapted else adapted)


def save_optimizer(optimizer: AdapterOptimizer, folder: Path) -> str:
    """Write the optimizer's state; return the file's name."""
    save_file(optimizer.state_dict(), folder / OPTIMIZER, metadata={"format": "pt"})
    return OPTIMIZER


def load_adapter(policy: PolicyModel, folder: Path) -> None:
    """Overwrite the policy's adapter; raises AdapterRejected, nothing changed, if it misfits."""
    weights, parameters = _read(folder / WEIGHTS), policy.parameters()
    if set(weights) != set(parameters):
        wrong = sorted(set(weights) ^ set(parameters))[:3]
        raise AdapterRejected(f"missing or unexpected tensors, first {wrong}", code="adapter_keys")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise AdapterRejected(f"{name} has a wrong shape", code="adapter_shape")
        if not weights[name].isfinite().all():
            raise AdapterRejected(f"{name} is not finite", code="adapter_not_finite")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def load_optimizer(optimizer: AdapterOptimizer, folder: Path) -> None:
    """Replace the optimizer's state; raises AdapterRejected if it does not fit."""
    optimizer.load_state_dict(_read(folder / OPTIMIZER))


def reset_to_base(policy: PolicyModel, seed: int = 0) -> None:
    """Make the policy version 0 again, in place; the optimizer's state is the caller's to clear."""
    initialise(policy, seed)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        raise AdapterRejected(f"{path.name}: {error}", code="unreadable") from error
    return tensors
