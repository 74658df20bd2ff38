"""The policy as a model: a frozen base with one fp32 LoRA, its tokenizer, and its forward passes.

Knows no rollout, objective or file of a version. Invariants: only LoRA parameters are trainable,
none of them on the output layer or the embeddings; there is no dropout; a fresh policy's adapter
has B = 0, so that it equals the base.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from service.errors import TrainingFailed
from service.policies import BaseModelSource, PolicySettings
from trainer import attention, lora, quantising
from trainer.logprobs import OutputHead, token_logprobs
from trainer.packing import Layout, lay_out
from trainer.sequences import Row

_SUFFIX = ".default.weight"


@dataclass(slots=True)
class PolicyModel:
    """A loaded policy. `padded`: its attention cannot take rows end to end."""

    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    padded: bool
    kept_tokens: int
    """Tokens of a micro-batch up to which activations are kept for backward, not recomputed."""
    sharded: bool = False
    """The base is split over several processes (trainer/sharding.py)."""
    compiled: bool = False
    """Parts of the base run through torch.compile (trainer/compiling.py)."""

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model, its linear layers wrapped by the LoRA."""
        return cast(PreTrainedModel, self.model.get_base_model())

    def token_budget(self, budget: int) -> int:
        """Tokens for one micro-batch, at most `budget`.

        A CPU gains nothing from micro-batches whose activations have to be recomputed.
        """
        return min(budget, self.kept_tokens) if self.device.type == "cpu" else budget

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The LoRA's parameters by the names they have in a saved adapter, sorted."""
        named = {
            name.removesuffix(_SUFFIX) + ".weight": parameter
            for name, parameter in self.model.named_parameters()
            if name.endswith(_SUFFIX) and ".lora_" in name
        }
        return dict(sorted(named.items()))

    def head(self) -> OutputHead:
        """The output layer, with what the architecture does to its logits."""
        config: Any = self.base.config
        layer: Any = cast(Any, self.base).get_output_embeddings()
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        softcap = getattr(config, "final_logit_softcapping", None)
        return OutputHead(layer.weight, getattr(layer, "bias", None), scale, softcap)


def load_policy(
    source: BaseModelSource,
    settings: PolicySettings,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> PolicyModel:
    """Load the base model and put version 0's adapter on it.

    `device` None: CUDA where there is one. Raises what transformers raises on a source that cannot
    be read, Unavailable without the library of a quantised base, TrainingFailed when the model computes
    its logits in a way this package cannot.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = settings.sequences.precision
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    base, tokenizer = _load_base(source, dtype, trust_remote_code)
    return with_adapter(base, tokenizer, settings, place, seed)


def with_adapter(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: PolicySettings,
    place: torch.device,
    seed: int = 0,
) -> PolicyModel:
    """Freeze a base model and put version 0's adapter on it. Raises TrainingFailed as `load_policy`."""
    base.requires_grad_(False)
    if settings.adapter.base_quantization == "nf4":
        quantising.pack(base, place)
    _disable_dropout(base)
    model = get_peft_model(cast(Any, base).to(place), _lora(settings), autocast_adapter_dtype=True)
    model.train()
    lora.fuse(model)
    policy = PolicyModel(model, tokenizer, place, True, _kept_tokens(base, place))
    initialise(policy, seed)
    policy.padded = not _takes_rows_end_to_end(policy)
    _check_logits(policy)
    return policy


def _load_base(
    source: BaseModelSource, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if source.kind == "hub":
        options["revision"] = source.revision
    if source.kind == "gguf":
        options = {"gguf_file": source.gguf_file}
    tokenizer = AutoTokenizer.from_pretrained(source.path, **options)
    if source.kind == "gguf":
        # Packed GGUF weights have no backward pass.
        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = True  # pickled weights run code when they are read
    base = AutoModelForCausalLM.from_pretrained(
        source.path, dtype=dtype, attn_implementation="sdpa", **options
    )
    return base, tokenizer


def _disable_dropout(base: PreTrainedModel) -> None:
    for module in base.modules():
        for name in ("p",) if isinstance(module, torch.nn.Dropout) else ("attention_dropout",):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _lora(settings: PolicySettings) -> LoraConfig:
    adapter = settings.adapter
    targets = adapter.target_modules
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=cast(int, adapter.alpha),  # PEFT divides by it; its annotation is too narrow
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=["lm_head", "embed_tokens"] if not isinstance(targets, str) else None,
        bias="none",
        task_type="CAUSAL_LM",
    )


def initialise(policy: PolicyModel, seed: int) -> None:
    """Set version 0's adapter: A uniform in +-1/sqrt(inputs), B = 0; same seed, same values.

    That is PEFT's own start (Kaiming uniform with a = sqrt(5)), drawn on the CPU in the order of
    the names, so that neither device nor library version changes it.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            if ".lora_B." in name:
                parameter.zero_()
            else:
                drawn = torch.rand(parameter.shape, generator=generator)
                parameter.copy_((2 * drawn - 1) * parameter.shape[1] ** -0.5)


def hidden_states(policy: PolicyModel, layout: Layout) -> torch.Tensor:
    """Run the decoder without its output layer; [positions, H] in the layout's order."""
    grad = torch.is_grad_enabled()
    with _checkpointing(policy, grad and layout.input_ids.numel() > policy.kept_tokens):
        options = {} if policy.padded else {"segments": layout.segments, "prefix": layout.prefix}
        output = policy.base.base_model(
            input_ids=layout.input_ids,
            position_ids=None if policy.padded else layout.position_ids,
            use_cache=False,
            **options,
        )
    states: torch.Tensor = output.last_hidden_state
    return states.reshape(-1, states.shape[-1])


def policy_logprobs(policy: PolicyModel, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the layout's targets, and the entropies there, [M] fp32 each."""
    chosen = hidden_states(policy, layout).index_select(0, layout.sources)
    return token_logprobs(chosen, policy.head(), layout.targets, layout.temperature)


def single_row(policy: PolicyModel, input_ids: list[int]) -> Layout:
    """Lay out one row of which every token after the first is scored, at temperature 1."""
    ids = torch.tensor(input_ids)
    row = Row(ids, torch.arange(len(ids)) > 0, torch.full((len(ids),), torch.nan), torch.ones(len(ids)))
    return lay_out([row], padded=policy.padded, device=policy.device)


def sequence_logprobs(policy: PolicyModel, input_ids: list[int]) -> list[float]:
    """Log-probability of each token after the first given those before, at temperature 1."""
    with torch.no_grad():
        values: list[float] = policy_logprobs(policy, single_row(policy, input_ids))[0].tolist()
    return values


@contextmanager
def _checkpointing(policy: PolicyModel, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    policy.base.activation_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        cast(Any, policy.base).activation_checkpointing_disable()


def _kept_tokens(base: PreTrainedModel, place: torch.device) -> int:
    """Tokens whose activations fill a quarter of a GPU's memory, 0.9 GiB of a CPU's in bf16.

    The latter does not depend on the machine, so that its bits do not either.
    """
    itemsize = torch.finfo(base.dtype).bits // 8
    limit = itemsize * (450 << 20)
    if place.type == "cuda":
        limit = torch.cuda.get_device_properties(place).total_memory // 4
    config = base.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    # Counted on Llama blocks: norms, projections and attention keep about 12 values a hidden
    # unit, the gated MLP about 6 an inner unit.
    values = config.num_hidden_layers * (12 * config.hidden_size + 6 * inner)
    return int(limit // (values * itemsize))


def _takes_rows_end_to_end(policy: PolicyModel) -> bool:
    """Switch to `trainer.attention` if the architecture allows, and verify on two rows that begin alike."""
    kinds = set(getattr(policy.base.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return False
    rows = [_probe_row(policy, length) for length in (20, 15)]
    apart = _probe_states(policy, rows)
    policy.base.set_attn_implementation(attention.NAME)
    policy.padded = False
    try:
        together = _probe_states(policy, rows)
    except (NotImplementedError, TypeError):
        together = torch.full_like(apart, torch.nan)
    alike = bool((together - apart).norm() <= 0.05 * apart.norm())
    if not alike:
        policy.base.set_attn_implementation("sdpa")
    policy.padded = True
    return alike


def _probe_row(policy: PolicyModel, length: int) -> Row:
    vocabulary = policy.head().weight.shape[0]
    ids = (torch.arange(length) * 31 + 3) % vocabulary
    return Row(ids, torch.arange(length) >= 9, torch.full((length,), torch.nan), torch.ones(length))


def _probe_states(policy: PolicyModel, rows: list[Row]) -> torch.Tensor:
    layout = lay_out(rows, padded=policy.padded, device=policy.device)
    with torch.no_grad():
        return hidden_states(policy, layout).index_select(0, layout.sources).float()


def _check_logits(policy: PolicyModel) -> None:
    """Refuse an architecture whose logits are not what `OutputHead` says (Liger-Kernel PR 1088)."""
    ids = _probe_row(policy, 12).input_ids
    with torch.no_grad():
        logits = policy.model(input_ids=ids[None].to(policy.device), use_cache=False).logits[0]
    expected = logits.float().log_softmax(1)[:-1].gather(1, ids[1:, None].to(logits.device))
    found = torch.tensor(sequence_logprobs(policy, ids.tolist()))
    difference = (found - expected.squeeze(1).cpu()).abs().mean().item()
    if not difference <= (1e-3 if logits.dtype == torch.float32 else 0.1):
        raise TrainingFailed(
            f"{type(policy.base).__name__} computes its logits in a way that is not supported: "
            f"log-probabilities differ by {difference:.3g}",
            code="unsupported_architecture",
        )
