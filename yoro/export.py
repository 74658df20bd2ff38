"""A pulled version in other people's formats: weights merged into the base, or a GGUF LoRA for llama.cpp.

Knows no service. Needs `yoro[trainer]` (torch, peft, gguf), imported where they are used. The GGUF
layout is llama.cpp's for LoRA adapters: the real one, over a base in fp32, gives the trainer's logprobs
to 1e-5 (tests/trainer/test_published_adapter.py, where `xllamacpp` is installed).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yoro.signature import PullError

_PREFIX = "base_model.model."
PERMUTED = ("llama",)
"""Architectures whose query and key rows GGUF stores in another order than Hugging Face does."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the layout depends on of a base model. Example: Shape("llama", 30, 9, 3)."""

    architecture: str
    blocks: int
    heads: int
    key_value_heads: int


def shape_of(config: Path) -> Shape:
    """Read a base model's config.json. Raises PullError for what has no GGUF name."""
    document = json.loads(config.read_text())
    name = str(document.get("model_type"))
    if name not in ("llama", "qwen2", "qwen3"):
        raise PullError(f"GGUF export knows llama, qwen2 and qwen3, not {name}")
    heads = int(document["num_attention_heads"])
    return Shape(
        name, int(document["num_hidden_layers"]), heads, int(document.get("num_key_value_heads", heads))
    )


def write_gguf(folder: Path, shape: Shape, target: Path) -> int:
    """Write a version's adapter as one GGUF file; return the number of tensors."""
    import gguf
    from safetensors.numpy import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == shape.architecture)
    names = gguf.get_tensor_name_map(architecture, shape.blocks)
    writer = gguf.GGUFWriter(target, shape.architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    for key in sorted(tensors):
        name, tensor = _converted(key, tensors[key], shape, names)
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(tensors)


def write_merged(folder: Path, base: str, target: Path) -> None:
    """Write base and adapter as one ordinary model, in the base's precision."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(base)
    merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True)
    merged.save_pretrained(target)
    AutoTokenizer.from_pretrained(base).save_pretrained(target)


def _converted(
    key: str, tensor: NDArray[np.float32], shape: Shape, names: Any
) -> tuple[str, NDArray[np.float32]]:
    """Return a tensor's GGUF name and its rows in GGUF's order."""
    module, side, _ = key.removeprefix(_PREFIX).rsplit(".", 2)
    found = names.get_name(module)
    if found is None:
        raise PullError(f"{module} has no name in GGUF's {shape.architecture}")
    if side == "lora_B" and shape.architecture in PERMUTED:
        if module.endswith("q_proj"):
            tensor = permuted(tensor, shape.heads)
        elif module.endswith("k_proj"):
            tensor = permuted(tensor, shape.key_value_heads)
    return f"{found}.weight.{side.lower()}", tensor


def permuted(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Interleave the two halves of each head's rows, as GGUF has rotary pairs side by side."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)
