"""The frozen base's linear layers in four bits: NF4 in blocks of 64, their scales quantised once more.

Knows no policy or version. Needs `yoro[quant]`, imported where it is used. One path for every kind of weights
file: what was loaded in the policy's precision is packed layer by layer, on the device where it stays.
Invariants: same weights, same bits; output layer, embeddings and norms stay as they are; products are
in the policy's precision, over weights that are unpacked for each of them and not kept.

NF4, double quantisation: Dettmers et al., QLoRA, arXiv 2305.14314.
"""

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from service.errors import Unavailable

BLOCK = 64
"""Weights that share a scale; a layer whose inputs are no multiple of it stays as it is: bitsandbytes 0.50.2
unpacks 32, 96 or 160 inputs wrongly on a CPU with AVX-512 (0.19 to 0.65 off in place of 0.09)."""


def pack(base: PreTrainedModel, place: torch.device) -> int:
    """Replace the decoder's linear layers by packed ones on `place`, in place; return how many.

    Raises Unavailable where bitsandbytes is missing.
    """
    library = _bitsandbytes()
    head, packed = cast(Any, base).get_output_embeddings(), 0
    # No list of the layers themselves: each is freed as it is replaced.
    for parent in [m for m in base.base_model.modules() if not isinstance(m, torch.nn.Linear)]:
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear and layer is not head and layer.in_features % BLOCK == 0:
                setattr(parent, name, _packed(library, layer, place))
                packed += 1
    return packed


def dense(weight: torch.Tensor, state: Any) -> torch.Tensor:
    """Return a layer's weight, [outputs, inputs], unpacked if it is packed; `state` None: it is not."""
    if state is None:
        return weight
    matrix: torch.Tensor = _bitsandbytes().functional.dequantize_4bit(weight, state)
    return matrix


def _packed(library: Any, layer: torch.nn.Linear, place: torch.device) -> torch.nn.Module:
    weight = layer.weight.data
    packed: torch.nn.Module = library.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=weight.dtype, device="meta"
    )
    packed.weight = library.nn.Params4bit(
        weight, quant_type="nf4", blocksize=BLOCK, compress_statistics=True, module=packed
    ).to(place)
    packed.bias = layer.bias
    return packed


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ModuleNotFoundError as error:
        raise Unavailable(
            "adapter.base_quantization is nf4, which needs bitsandbytes here: pip install 'yoro[quant]'"
        ) from error
    return bitsandbytes
