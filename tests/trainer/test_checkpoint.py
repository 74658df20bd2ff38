"""A version's files: stock PEFT, same bytes, nothing of this machine, and a resume that is exact."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from service.errors import AdapterRejected
from service.policies import BaseModelSource, PolicySettings
from tests.trainer.batches import random_batch, shake, with_objective
from trainer.checkpoint import (
    CONFIG,
    WEIGHTS,
    load_adapter,
    load_optimizer,
    reset_to_base,
    save_adapter,
    save_optimizer,
)
from trainer.optimizer import AdapterOptimizer
from trainer.policy import PolicyModel, load_policy, sequence_logprobs
from trainer.step import train_batch

IDS = [7, 90, 33, 120, 64, 2, 250]


def step(policy: PolicyModel, optimizer: AdapterOptimizer, number: int) -> None:
    batch, settings = random_batch(number), with_objective(gate="none")
    result = train_batch(policy, optimizer, batch, settings, step_number=number, load_version=lambda _: None)
    assert result.outcome == "stepped"


def weights(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.parameters().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_saved_adapter_loads_with_plain_peft_and_gives_the_same_logprobs(
    policy: PolicyModel, tiny_folder: Path, tmp_path: Path
) -> None:
    assert save_adapter(policy, tmp_path, "tiny", "abc") == [WEIGHTS, CONFIG]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_folder), tmp_path)
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
    expected = logits.log_softmax(1)[:-1].gather(1, torch.tensor(IDS[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(sequence_logprobs(policy, IDS)), expected)


def test_saved_weights_are_those_that_peft_would_save(policy: PolicyModel, tmp_path: Path) -> None:
    save_adapter(policy, tmp_path, "tiny", None)
    stock = get_peft_model_state_dict(policy.model, save_embedding_layers=False)
    assert same(load_file(tmp_path / WEIGHTS), dict(stock))


def test_config_names_the_logical_base_and_no_path(
    policy: PolicyModel, tiny_folder: Path, tmp_path: Path
) -> None:
    save_adapter(policy, tmp_path, "smollm2-135m", "sha256:abc")
    text = (tmp_path / CONFIG).read_text()
    config = json.loads(text)
    assert config["base_model_name_or_path"] == "smollm2-135m"
    assert config["revision"] == "sha256:abc"
    assert config["inference_mode"] is True
    attention, mlp = ["k_proj", "o_proj", "q_proj", "v_proj"], ["down_proj", "gate_proj", "up_proj"]
    assert config["target_modules"] == sorted(attention + mlp)
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "CAUSAL_LM")
    assert str(tiny_folder) not in text


def test_neither_output_layer_nor_embeddings_have_an_adapter(policy: PolicyModel) -> None:
    assert not any("lm_head" in name or "embed" in name for name in policy.parameters())
    assert len(policy.parameters()) == 2 * 2 * 7


def test_same_weights_give_the_same_bytes(policy: PolicyModel, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_adapter(policy, tmp_path / name, "tiny", None)
    for file in (WEIGHTS, CONFIG):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_save_load_step_equals_the_uninterrupted_step_bit_for_bit(
    policy: PolicyModel, tiny_source: BaseModelSource, settings: PolicySettings, tmp_path: Path
) -> None:
    optimizer = AdapterOptimizer(policy.parameters(), settings.optimizer)
    step(policy, optimizer, 1)
    save_adapter(policy, tmp_path, "tiny", None)
    save_optimizer(optimizer, tmp_path)
    step(policy, optimizer, 2)
    resumed = load_policy(tiny_source, settings, device="cpu", seed=99)
    other = AdapterOptimizer(resumed.parameters(), settings.optimizer)
    load_adapter(resumed, tmp_path)
    load_optimizer(other, tmp_path)
    step(resumed, other, 2)
    assert same(weights(resumed), weights(policy))
    assert same(other.state_dict(), optimizer.state_dict())


def test_loading_keeps_the_identity_of_parameters(policy: PolicyModel, tmp_path: Path) -> None:
    before = policy.parameters()
    save_adapter(policy, tmp_path, "tiny", None)
    saved = weights(policy)
    shake(policy, seed=77)
    load_adapter(policy, tmp_path)
    assert all(policy.parameters()[name] is before[name] for name in before)
    assert all(parameter.requires_grad for parameter in before.values())
    assert same(weights(policy), saved)


def test_reset_is_version_zero_again(
    policy: PolicyModel, tiny_source: BaseModelSource, settings: PolicySettings
) -> None:
    fresh = load_policy(tiny_source, settings, device="cpu", seed=3)
    reset_to_base(policy, 3)
    assert same(weights(policy), weights(fresh))
    with policy.model.disable_adapter():
        base = sequence_logprobs(policy, IDS)
    assert sequence_logprobs(policy, IDS) == base
    assert not all(torch.equal(a, b) for a, b in zip(weights(policy).values(), start(policy, 4), strict=True))


def start(policy: PolicyModel, seed: int) -> list[torch.Tensor]:
    reset_to_base(policy, seed)
    return list(weights(policy).values())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda w, name: {k: v for k, v in w.items() if k != name}, "adapter_keys"),
        (lambda w, name: {**w, "base_model.model.extra.weight": w[name].clone()}, "adapter_keys"),
        (lambda w, name: {**w, name: torch.zeros(1, 1)}, "adapter_shape"),
        (lambda w, name: {**w, name: torch.full_like(w[name], torch.nan)}, "adapter_not_finite"),
    ],
)
def test_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    policy: PolicyModel, tmp_path: Path, change: object, code: str
) -> None:
    before = weights(policy)
    assert callable(change)
    save_file(change(before, next(iter(before))), tmp_path / WEIGHTS)
    with pytest.raises(AdapterRejected) as refusal:
        load_adapter(policy, tmp_path)
    assert refusal.value.code == code
    assert same(weights(policy), before)


def test_file_that_is_no_safetensors_is_refused(policy: PolicyModel, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"not a tensor file")
    with pytest.raises(AdapterRejected):
        load_adapter(policy, tmp_path)
