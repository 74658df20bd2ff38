"""yoro's step, and the bare model's forward and backward over the same packed tokens.

    python -m benchmarks.training.step_arm ROLLOUTS PRECISION {step|bare|floor} [REFERENCE_KL]

`step`: `train_batch`, from rows to stepped. `bare`: the same model, LoRA and micro-batches with nothing
of the objective: the decoder, the model's own output layer (its own type, all logits at once) at the
completion's positions, mean cross-entropy, backward; then the same without output layer, as a second
figure. `floor`: the matrix products alone, each shape measured and multiplied.
"""

import sys
import time
from pathlib import Path

import torch

from benchmarks.training import rollouts
from benchmarks.training.rollouts import RANK, Rollout, Watch, say
from service.policies import PolicySettings, locate_base_model
from trainer.optimizer import AdapterOptimizer
from trainer.packing import Layout, lay_out, micro_batches
from trainer.policy import PolicyModel, hidden_states, load_policy
from trainer.sequences import RolloutRows, Row
from trainer.step import TrainingBatch, TrainingRollout, train_batch


def main() -> None:
    """Measure what the command line asks for."""
    path, precision, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    settings = settings_of(precision, float(sys.argv[4]) if len(sys.argv) > 4 else 0.0)
    chosen = rollouts.load(path)
    policy = load_policy(locate_base_model("smollm2-135m", None, None), settings, device="cpu")
    warm_up(policy)
    if what == "step":
        say(**step(policy, batch(chosen), settings))
    elif what == "bare":
        layouts = packed(policy, chosen, settings)
        say(
            **bare(policy, layouts, with_head=True),
            decoder_seconds=bare(policy, layouts, with_head=False)["seconds"],
        )
    else:
        say(seconds=floor(policy, packed(policy, chosen, settings)))


def settings_of(precision: str, reference_kl: float) -> PolicySettings:
    """The policy's settings: LoRA rank 16, all linear layers."""
    return PolicySettings.model_validate(
        {
            "base_model": "smollm2-135m",
            "adapter": {"rank": RANK, "alpha": RANK},
            "objective": {"reference_kl": reference_kl},
            "sequences": {"precision": precision},
        }
    )


def row(rollout: Rollout) -> Row:
    """One row, its sampler logprobs unknown: sampled by the head, so that the ratio is 1."""
    tokens = rollout.tokens
    return Row(
        torch.tensor(rollout.prompt + rollout.completion),
        torch.arange(tokens) >= len(rollout.prompt),
        torch.full((tokens,), torch.nan),
        torch.ones(tokens),
    )


def batch(chosen: list[Rollout]) -> TrainingBatch:
    """The rollouts as the trainer takes them."""
    members = [
        TrainingRollout(
            i, RolloutRows((row(r),), "exact", "", (), len(r.completion), (0,)), r.advantage, 0.5, True
        )
        for i, r in enumerate(chosen)
    ]
    mean = sum(len(r.completion) for r in chosen) / len(chosen)
    return TrainingBatch(members, len(members), mean)


def warm_up(policy: PolicyModel) -> None:
    """Let libraries allocate what they keep."""
    loss = policy.model(input_ids=torch.arange(64)[None], use_cache=False).logits.float().sum()
    torch.autograd.backward(loss)
    policy.model.zero_grad(set_to_none=True)


def step(policy: PolicyModel, made: TrainingBatch, settings: PolicySettings) -> dict[str, float]:
    """Time one optimizer step."""
    optimizer = AdapterOptimizer(policy.parameters(), settings.optimizer)
    watch = Watch()
    result = train_batch(policy, optimizer, made, settings, step_number=1, load_version=lambda _: None)
    assert result.outcome == "stepped"
    return watch.read() | {"micro_batches": result.metrics["n_micro_batches"]}


def packed(policy: PolicyModel, chosen: list[Rollout], settings: PolicySettings) -> list[Layout]:
    """The micro-batches that the step makes."""
    rows = [[row(r)] for r in chosen]
    budget = policy.token_budget(settings.sequences.token_budget)
    plan = micro_batches(rows, budget, padded=policy.padded)
    return [
        lay_out([rows[i][0] for i in group], padded=policy.padded, device=policy.device) for group in plan
    ]


def bare(policy: PolicyModel, layouts: list[Layout], *, with_head: bool) -> dict[str, float]:
    """Time forward and backward of the model over the layouts."""
    layer = policy.base.get_output_embeddings()
    watch = Watch()
    for layout in layouts:
        chosen = hidden_states(policy, layout).index_select(0, layout.sources)
        if with_head:
            loss = torch.nn.functional.cross_entropy(layer(chosen).float(), layout.targets)
        else:
            loss = chosen.float().mean()
        torch.autograd.backward(loss)
    found = watch.read()
    policy.model.zero_grad(set_to_none=True)
    return found


def floor(policy: PolicyModel, layouts: list[Layout]) -> float:
    """Seconds of the step's matrix products: y = xW', dx = dyW, and LoRA's six small ones; then the head.

    Attention's products are left out.
    """
    total, dtype = 0.0, policy.base.dtype
    for layout in layouts:
        tokens, scored = layout.input_ids.numel(), len(layout.targets)
        seen: dict[tuple[int, int], float] = {}
        for name, parameter in policy.model.named_parameters():
            if name.endswith("base_layer.weight"):
                shape = (parameter.shape[0], parameter.shape[1])
                if shape not in seen:
                    seen[shape] = _linear_seconds(tokens, *shape, dtype)
                total += seen[shape]
        head = policy.head().weight
        total += 2 * _product_seconds(scored, head.shape[1], head.shape[0], dtype)
    return total


def _linear_seconds(tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> float:
    large = 2 * _product_seconds(tokens, inputs, outputs, dtype)
    return large + 3 * (
        _product_seconds(tokens, inputs, RANK, dtype) + _product_seconds(tokens, RANK, outputs, dtype)
    )


def _product_seconds(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """Best of three of [rows, inner] x [inner, columns]."""
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        torch.mm(left, right.T)
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    main()
