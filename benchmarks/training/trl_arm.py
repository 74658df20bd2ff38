"""TRL's GRPOTrainer update over the same rollouts; runs in TRL's own virtual environment.

    python -m benchmarks.training.trl_arm ROLLOUTS PRECISION BETA MICRO_BATCH [COUNT]

Completions are given through `rollout_func`, rewards are made up (they only have to differ within a pair:
GRPO needs groups), the LoRA is the same. Timed is the update alone: from the end of
`_generate_and_score_completions` to the end of the optimizer's step, plus, with beta > 0, the reference
pass that TRL makes within it. Tokenising, padding and rewards are not timed. Gradient checkpointing, on by
default in TRL, is off, which is faster.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.training import rollouts
from benchmarks.training.rollouts import RANK, Watch, say

GROUP = 2


class Timed(GRPOTrainer):
    """Starts a watch where the update begins, and counts the reference pass before it."""

    reference: dict[str, float]
    watch: Watch

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.reference = {"seconds": 0.0, "processor_seconds": 0.0}
        made = super()._generate_and_score_completions(inputs)
        self.generated = True
        self.watch = Watch()
        return made

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        before = Watch()
        found = super()._get_per_token_logps_and_entropies(*arguments, **options)
        if not torch.is_grad_enabled():
            self.reference = {k: v + before.read()[k] for k, v in self.reference.items()}
        return found


class AtStepEnd(TrainerCallback):
    """Reads the watch after the optimizer's step."""

    def __init__(self) -> None:
        self.trainer: Timed | None = None
        self.figures: dict[str, float] = {}

    def on_step_end(self, *_arguments: Any, **_options: Any) -> None:
        """Take the time."""
        assert self.trainer is not None
        reference = self.trainer.reference
        self.figures = {k: v + reference[k] for k, v in self.trainer.watch.read().items()}


def main() -> None:
    """Make one step and say what it took."""
    path, precision, beta, micro = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    chosen = rollouts.load(path)[: int(sys.argv[5]) if len(sys.argv) > 5 else None]
    model, tokenizer = load(precision)
    chances = iter(range(1 << 30))
    callback = AtStepEnd()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model,
            reward_funcs=lambda completions, **_: [float(next(chances) % 2) for _ in completions],
            args=options(folder, precision, beta, micro, len(chosen)),
            train_dataset=Dataset.from_dict({"prompt": [f"task {i}" for i in range(len(chosen) // GROUP)]}),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            rollout_func=lambda prompts, _: {
                "prompt_ids": [r.prompt for r in chosen],
                "completion_ids": [r.completion for r in chosen],
                "logprobs": None,
            },
            callbacks=[callback],
        )
        callback.trainer = trainer
        warm_up(trainer.model)
        trainer.train()
    assert trainer.state.global_step == 1
    say(**callback.figures)


def options(folder: str, precision: str, beta: float, micro: int, count: int) -> GRPOConfig:
    """One step over all rollouts, in micro-batches."""
    return GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=precision == "bf16", beta=beta, max_steps=1,
        per_device_train_batch_size=micro, gradient_accumulation_steps=count // micro,
        num_generations=GROUP, generation_batch_size=count, learning_rate=2e-5,
        gradient_checkpointing=False, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, seed=0, dataloader_pin_memory=False, max_completion_length=200,
    )  # fmt: skip


def load(precision: str) -> tuple[Any, Any]:
    """The bundled model, as `trainer.policy` loads it."""
    from service.policies import locate_base_model

    source = locate_base_model("smollm2-135m", None, None)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(source.path, gguf_file=source.gguf_file)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        source.path, gguf_file=source.gguf_file, dtype=dtype, attn_implementation="sdpa",
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    return model, tokenizer


def warm_up(model: Any) -> None:
    """Let libraries allocate what they keep."""
    loss = model(input_ids=torch.arange(64)[None], use_cache=False).logits.float().sum()
    torch.autograd.backward(loss)
    model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
