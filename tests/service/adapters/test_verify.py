"""Crafted files: each defect of an adapter is refused with its own code."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from service.adapters.verify import Base, verify
from service.errors import AdapterRejected
from service.policies import Adapter

SHAPE = Adapter(rank=4)
A, B = "base_model.model.layers.0.q_proj.lora_A.weight", "base_model.model.layers.0.q_proj.lora_B.weight"
Tensors = dict[str, NDArray[np.float32]]


def good() -> Tensors:
    return {A: np.ones((4, 8), dtype=np.float32), B: np.ones((8, 4), dtype=np.float32)}


def write(folder: Path, tensors: Tensors, **config: object) -> Path:
    save_file(tensors, folder / "adapter_model.safetensors")
    document = {"peft_type": "LORA", "r": 4, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


def test_a_sound_adapter_passes(tmp_path: Path) -> None:
    verify(write(tmp_path, good()), SHAPE)


DEFECTS: dict[str, Callable[[Tensors], Tensors]] = {
    "empty": lambda t: {},
    "key_prefix": lambda t: {"base_model.model._orig_mod." + A[17:]: t[A], B: t[B]},
    "key_kind": lambda t: t | {"base_model.model.lm_head.weight": t[A]},
    "unpaired": lambda t: {A: t[A]},
    "empty_tensor": lambda t: t | {B: np.zeros((0, 4), dtype=np.float32)},
    "dtype": lambda t: t | {B: t[B].astype(np.float16)},  # type: ignore[dict-item]
    "not_finite": lambda t: t | {B: np.full((8, 4), np.nan, dtype=np.float32)},
    "rank": lambda t: {A: np.ones((2, 8), dtype=np.float32), B: np.ones((8, 2), dtype=np.float32)},
    "all_zero": lambda t: t | {B: np.zeros((8, 4), dtype=np.float32)},
}


@pytest.mark.parametrize("code", sorted(DEFECTS))
def test_each_defect_has_its_code(code: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected) as refused:
        verify(write(tmp_path, DEFECTS[code](good())), SHAPE)
    assert refused.value.code == code


@pytest.mark.parametrize(
    "config",
    [
        {"r": 8}, {"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["x"]}, {"lora_alpha": 1.0},
        {"rank_pattern": {"q": 8}}, {"alpha_pattern": {"q": 8}}, {"layers_to_transform": [0]},
        {"lora_bias": True}, {"peft_type": "IA3"},
    ],
)  # fmt: skip
def test_a_configuration_that_servers_cannot_load_is_refused(
    config: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(AdapterRejected) as refused:
        verify(write(tmp_path, good(), **config), SHAPE)
    assert refused.value.code == "config"


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, good())
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AdapterRejected) as refused:
        verify(folder, SHAPE)
    assert refused.value.code == "unreadable"


@pytest.mark.parametrize("base", [Base("another", "r1"), Base("small", "r2"), Base("small", None)])
def test_an_adapter_for_another_base_model_or_revision_is_refused(base: Base, tmp_path: Path) -> None:
    folder = write(tmp_path, good(), base_model_name_or_path="small", revision="r1")
    verify(folder, SHAPE, base=Base("small", "r1"))
    with pytest.raises(AdapterRejected) as refused:
        verify(folder, SHAPE, base=base)
    assert refused.value.code == "base_model"


@pytest.mark.parametrize("body", [b"", b"\x00" * 40, b"\xff" * 8])
def test_a_file_that_is_no_safetensors_is_refused(body: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path, good())
    (folder / "adapter_model.safetensors").write_bytes(body)
    with pytest.raises(AdapterRejected):
        verify(folder, SHAPE)


@pytest.mark.parametrize("body", ["", "[]", "{"])
def test_a_configuration_that_is_no_object_is_refused(body: str, tmp_path: Path) -> None:
    folder = write(tmp_path, good())
    (folder / "adapter_config.json").write_text(body)
    with pytest.raises(AdapterRejected) as refused:
        verify(folder, SHAPE)
    assert refused.value.code == "unreadable"
