"""Is the gradient right: yoro's in fp32 against a slow one, yoro's in bf16 against its own in fp32.

    python -m benchmarks.training.gradient_arm ROLLOUTS

The slow one shares nothing with `trainer`: stock PEFT over stock transformers, eager attention, a rollout at
a time, the whole softmax of every position; in double precision over the fp32 weights, so that its
rounding does not count against yoro's. The adapter's B is shaken, since B = 0 leaves A without a gradient.
`bf16 with attention in bf16` says what attention's backward in bf16 would cost.
"""

import sys
import tempfile
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GgufConfig

from benchmarks.training import rollouts
from benchmarks.training.rollouts import Rollout, say
from benchmarks.training.step_arm import batch, settings_of
from service.policies import locate_base_model
from trainer.checkpoint import save_adapter
from trainer.optimizer import AdapterOptimizer
from trainer.policy import PolicyModel, load_policy
from trainer.step import dry_run

Gradient = dict[str, torch.Tensor]


class _Keeping(AdapterOptimizer):
    """Keeps the gradient that it is asked to forget."""

    kept: Gradient

    def zero_grad(self) -> None:
        found = {n: p.grad.clone() for n, p in self.parameters.items() if p.grad is not None}
        self.kept = found or getattr(self, "kept", {})
        super().zero_grad()


def main() -> None:
    """Compare."""
    chosen = rollouts.load(Path(sys.argv[1]))
    exact = _own("fp32", chosen)
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(_policy("fp32"), Path(folder), "smollm2-135m", None)
        slow = _slow(Path(folder), chosen)
    say(
        fp32_distance=_distance(exact, slow),
        bf16_cosine=_cosine(_own("bf16", chosen), exact),
        bf16_attention_cosine=_cosine(_own("bf16", chosen, stock_attention=True), exact),
    )


def _policy(precision: str) -> PolicyModel:
    policy = load_policy(
        locate_base_model("smollm2-135m", None, None), settings_of(precision, 0.0), device="cpu"
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.parameters().items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return policy


def _own(precision: str, chosen: list[Rollout], *, stock_attention: bool = False) -> Gradient:
    policy, settings = _policy(precision), settings_of(precision, 0.0)
    if stock_attention:
        policy.base.set_attn_implementation("sdpa")
        policy.padded = True
    optimizer = _Keeping(policy.parameters(), settings.optimizer)
    dry_run(policy, optimizer, batch(chosen), settings)
    return optimizer.kept


def _slow(adapter: Path, chosen: list[Rollout]) -> Gradient:
    """Gradient of - sum A log p / (B L), with importance weights of 1."""
    source = locate_base_model("smollm2-135m", None, None)
    base = AutoModelForCausalLM.from_pretrained(
        source.path, gguf_file=source.gguf_file, dtype=torch.float32, attn_implementation="eager",
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True).double()
    total = sum(len(r.completion) for r in chosen)
    for rollout in chosen:
        ids = torch.tensor(rollout.prompt + rollout.completion)
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(1)
        picked = logprobs[:-1].gather(1, ids[1:, None])[-len(rollout.completion) :]
        (-rollout.advantage * picked.sum() / total).backward()
    return {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}


def _flat(gradient: Gradient) -> torch.Tensor:
    return torch.cat([gradient[name].flatten().double() for name in sorted(gradient)])


def _distance(found: Gradient, expected: Gradient) -> float:
    return float((_flat(found) - _flat(expected)).norm() / _flat(expected).norm())


def _cosine(a: Gradient, b: Gradient) -> float:
    return float(torch.cosine_similarity(_flat(a), _flat(b), dim=0))


if __name__ == "__main__":
    main()
