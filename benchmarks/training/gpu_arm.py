"""A 7-8B-shaped random model on a GPU: tokens a second, MFU, peak memory, memory of the logprobs.

    python -m benchmarks.training.gpu_arm {full|toy}

`full` needs CUDA: Llama-3-8B's shape, random weights in bf16 made on the GPU, LoRA rank 32 on all linear
layers, rollouts of 8,192 tokens of which a quarter are scored, one warm-up step, then the measured one. `toy`
runs the same code over two small layers on whatever there is, to see that it runs; it measures nothing.

MFU counts 4 operations a base weight and token (2 forward, 2 for the gradient of the inputs; the frozen
weights have none), 6 a LoRA weight, 12 layers x heads x head size x length / 2 for causal attention, and no
recomputation, against `PEAK_TFLOPS` of the GPU's name in bf16 without sparsity.
"""

import sys
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.training.rollouts import Watch, say
from service.policies import PolicySettings
from trainer.logprobs import OutputHead, token_logprobs
from trainer.optimizer import AdapterOptimizer
from trainer.policy import PolicyModel, with_adapter
from trainer.sequences import RolloutRows, Row
from trainer.step import TrainingBatch, TrainingRollout, train_batch

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}
VOCABULARIES = (32_000, 128_000, 256_000)
LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
TOY = LLAMA_8B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def main() -> None:
    """Measure, or say why not."""
    toy = sys.argv[1] == "toy"
    if not toy and not torch.cuda.is_available():
        print("not run: no GPU")
        return
    length, count = (64, 3) if toy else (8192, 4)
    policy, settings = _policy(TOY if toy else LLAMA_8B, rank=4 if toy else 32)
    made = _batch(policy, length, count)
    optimizer = AdapterOptimizer(policy.parameters(), settings.optimizer)
    figures: dict[str, float] = {}
    for number in (1, 2):
        _reset_peak()
        watch = Watch()
        result = train_batch(
            policy, optimizer, made, settings, step_number=number, load_version=lambda _: None
        )
        assert result.outcome == "stepped"
        figures = watch.read()
    tokens = length * count
    operations = _operations(policy, length) * tokens
    say(
        **figures,
        tokens_per_second=tokens / figures["seconds"],
        tflops=operations / figures["seconds"] / 1e12,
        mfu=operations / figures["seconds"] / 1e12 / _peak_tflops(),
        peak_gpu_gb=_peak() / 1e9,
        **{
            f"logprob_gb_{v}": _logprob_memory(policy.device, v, 8 if toy else 2048) / 1e9
            for v in VOCABULARIES
        },
    )


def _policy(shape: dict[str, Any], rank: int) -> tuple[PolicyModel, PolicySettings]:
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = PolicySettings.model_validate(
        {
            "base_model": "random",
            "adapter": {"rank": rank, "alpha": rank},
            "objective": {"reference_kl": 0.0},
            "sequences": {"precision": "bf16", "max_tokens": 8192, "token_budget": 8192},
        }
    )
    torch.manual_seed(0)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with place:
        base = LlamaForCausalLM._from_config(LlamaConfig(**shape), attn_implementation="sdpa")  # noqa: SLF001
    torch.set_default_dtype(kept)
    return with_adapter(base, cast(Any, None), settings, place), settings


def _batch(policy: PolicyModel, length: int, count: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(1)
    vocabulary, members = policy.head().weight.shape[0], []
    scored = length // 4
    for number in range(count):
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        row = Row(
            ids, torch.arange(length) >= length - scored, torch.full((length,), torch.nan), torch.ones(length)
        )
        rows = RolloutRows((row,), "exact", "", (), scored, (0,))
        members.append(TrainingRollout(number, rows, 0.5 - number % 2, 0.5, True))
    return TrainingBatch(members, count, float(scored))


def _operations(policy: PolicyModel, length: int) -> float:
    """Floating-point operations a token (see the module's text)."""
    config: Any = policy.base.config
    head = policy.head().weight.numel()
    total = sum(p.numel() for p in policy.base.parameters())
    lora = sum(p.numel() for p in policy.parameters().values())
    embedding = 0 if config.tie_word_embeddings else head
    inner = total - lora - embedding - head
    attention = 12 * config.num_hidden_layers * config.hidden_size * length / 2
    # The output layer sees a quarter of the tokens: the scored ones.
    return 4 * inner + 6 * lora + 4 * head / 4 + attention


def _peak_tflops() -> float:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), float("nan"))


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peak() -> float:
    return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else float("nan")


def _logprob_memory(place: torch.device, vocabulary: int, tokens: int, hidden: int = 256) -> float:
    """Peak bytes of scoring, beside its inputs; nan without CUDA, which is what counts them."""
    with place:
        states = torch.randn(tokens, hidden, dtype=torch.bfloat16).requires_grad_()
        head = OutputHead(torch.randn(vocabulary, hidden, dtype=torch.bfloat16))
        targets = torch.zeros(tokens, dtype=torch.int64)
        temperature = torch.ones(tokens)
    _reset_peak()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    logprobs, _ = token_logprobs(states, head, targets, temperature)
    torch.autograd.backward(logprobs.sum())
    return _peak() - before


if __name__ == "__main__":
    main()
