"""Structural verification of an adapter's files, by safetensors and numpy alone.

Knows no model: behaviour (logprobs) is probed by the trainer. Each defect has its own code;
a version that fails is never published.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from service.errors import AdapterRejected
from service.policies import Adapter

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_FOREIGN = ("_orig_mod.", ".default.", "module.")
"""Left in keys by torch.compile, PEFT's adapter name and DDP: no server would match them."""
_IGNORED_BY_SERVERS = ("rank_pattern", "alpha_pattern", "layers_to_transform", "lora_bias")
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Base:
    """The base model that an adapter is a delta to: its logical name and what pins its weights."""

    name: str
    revision: str | None


def verify(folder: Path, shape: Adapter, *, base: Base | None = None, expect_nonzero: bool = True) -> None:
    """Check weights and configuration against the policy's adapter. Raises AdapterRejected with a code."""
    tensors = _load(folder / WEIGHTS)
    _check_names(tensors)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    for name in tensors:
        _check_pair(name.removesuffix(_A).removesuffix(_B), tensors, shape.rank)
    if expect_nonzero and not any(tensor.any() for name, tensor in tensors.items() if name.endswith(_B)):
        raise AdapterRejected("Every lora_B is zero after a step", code="all_zero")
    config = _read_config(folder / CONFIG)
    _check_config(config, shape)
    if base is not None and (found := (config.get("base_model_name_or_path"), config.get("revision"))) != (
        base.name, base.revision,
    ):  # fmt: skip
        raise AdapterRejected(f"{CONFIG} is for the base {found}, the policy's is {base}", code="base_model")


def _load(path: Path) -> dict[str, NDArray[np.float32]]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterRejected(f"{path.name} does not open: {error}", code="unreadable") from error


def _check_names(tensors: Mapping[str, NDArray[np.float32]]) -> None:
    if not tensors:
        raise AdapterRejected("The adapter holds no tensor", code="empty")
    for name in tensors:
        if not name.startswith(_PREFIX) or any(part in name for part in _FOREIGN):
            raise AdapterRejected(f"Key {name} has a foreign prefix", code="key_prefix")
        if not name.endswith((_A, _B)):
            raise AdapterRejected(f"Key {name} is neither lora_A nor lora_B", code="key_kind")


def _check_tensor(name: str, tensor: NDArray[np.float32]) -> None:
    if tensor.ndim != 2 or tensor.size == 0:
        raise AdapterRejected(f"{name} has shape {tensor.shape}", code="empty_tensor")
    if tensor.dtype != np.float32:
        raise AdapterRejected(f"{name} is {tensor.dtype}, not float32", code="dtype")
    if not np.isfinite(tensor).all():
        raise AdapterRejected(f"{name} holds NaN or infinity", code="not_finite")


def _check_pair(module: str, tensors: Mapping[str, NDArray[np.float32]], rank: int) -> None:
    down, up = tensors.get(module + _A), tensors.get(module + _B)
    if down is None or up is None:
        raise AdapterRejected(f"{module} lacks one of lora_A and lora_B", code="unpaired")
    if down.shape[0] != rank or up.shape[1] != rank:
        raise AdapterRejected(f"{module} has rank {down.shape[0]}, the policy {rank}", code="rank")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AdapterRejected(f"{path.name} does not open: {error}", code="unreadable") from error
    if not isinstance(config, dict):
        raise AdapterRejected(f"{path.name} is not an object", code="unreadable")
    return config


def _check_config(config: dict[str, Any], shape: Adapter) -> None:
    if config.get("peft_type") != "LORA" or config.get("r") != shape.rank:
        raise AdapterRejected(f"{CONFIG} is not a LoRA of rank {shape.rank}", code="config")
    if config.get("lora_alpha", shape.alpha) != shape.alpha:
        raise AdapterRejected(f"{CONFIG} scales by {config['lora_alpha']}, not {shape.alpha}", code="config")
    if config.get("modules_to_save") or config.get("use_dora") or config.get("bias", "none") != "none":
        raise AdapterRejected(f"{CONFIG} asks for what servers cannot load", code="config")
    # vLLM drops these without a word and serves another adapter than was trained.
    if ignored := [name for name in _IGNORED_BY_SERVERS if config.get(name)]:
        raise AdapterRejected(f"{CONFIG} has {', '.join(ignored)}, which servers ignore", code="config")
