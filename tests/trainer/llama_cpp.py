"""The real llama.cpp (PyPI's `xllamacpp`), serving the tiny model with GGUF LoRAs.

Knows nothing of yoro but the order of query and key rows, which its answers then judge.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
from safetensors.numpy import load_file
from transformers import AutoTokenizer, LlamaConfig

from yoro.export import permuted


class LlamaCpp:
    """One llama.cpp server in this process."""

    def __init__(self, base: Path, loras: Sequence[Path], letter: int) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(base)
        parameters.n_ctx, parameters.n_parallel, parameters.warmup, parameters.verbosity = 512, 1, False, -1
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(path), 0.0) for path in loras]
        self._letter = letter
        self._server = xllamacpp.Server(parameters)
        self._url = self._server.listening_address

    def next_logprobs(
        self, prompt: Sequence[int], lora: int | None, *, cache: bool = False
    ) -> dict[int, float]:
        """Logprob of every next token after the prompt; `lora` None: of the base model."""
        # The bias forces a token that is whole UTF-8, else it sends no probabilities; those are without it.
        answer = self._complete(
            prompt, lora, cache=cache, n_predict=1, n_probs=1000, logit_bias=[[self._letter, 1000]]
        )
        return {each["id"]: each["logprob"] for each in answer["completion_probabilities"][0]["top_logprobs"]}

    def greedy(self, prompt: Sequence[int], lora: int | None, count: int) -> list[int]:
        """The tokens that it continues the prompt with."""
        answer = self._complete(prompt, lora, cache=False, n_predict=count, n_probs=1, ignore_eos=True)
        return [each["id"] for each in answer["completion_probabilities"]]

    def _complete(self, prompt: Sequence[int], lora: int | None, *, cache: bool, **options: Any) -> Any:
        document = {
            "prompt": list(prompt), "temperature": 0.0, "top_k": 1, "cache_prompt": cache,
            "lora": [] if lora is None else [{"id": lora, "scale": 1.0}], **options,
        }  # fmt: skip
        answer = httpx.post(f"{self._url}/completion", json=document, timeout=30)
        answer.raise_for_status()
        return answer.json()


def write_base(model: Path, target: Path) -> Path:
    """Write a Llama folder as a GGUF file in fp32; return the file."""
    config = LlamaConfig.from_pretrained(model)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in load_file(model / "model.safetensors").items():
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(
            key.rpartition(".self_attn.")[2][0]
        )
        rows = permuted(tensor, heads) if heads and "_proj" in key and ".self_attn." in key else tensor
        writer.add_tensor(f"{names.get_name(key.removesuffix('.weight'))}.weight", np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    """Prompts are sent as ids: only the number of tokens matters."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
