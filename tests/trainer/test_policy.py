"""What a loaded policy is: a frozen base, one fp32 adapter, no dropout, exact forward passes."""

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear

from service.policies import BaseModelSource, PolicySettings
from tests.trainer.batches import TINY, with_sequences
from trainer.policy import PolicyModel, load_policy, sequence_logprobs

IDS = [7, 90, 33, 120, 64, 2, 250]


def test_only_the_adapter_is_trainable_and_in_fp32(tiny_source: BaseModelSource) -> None:
    policy = load_policy(tiny_source, with_sequences(precision="bf16"), device="cpu")
    trainable = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert len(trainable) == len(policy.parameters()) > 0
    assert all(".lora_" in name for name in trainable)
    assert {p.dtype for p in policy.parameters().values()} == {torch.float32}
    assert policy.base.dtype == torch.bfloat16


def test_version_zero_equals_the_base(tiny_source: BaseModelSource) -> None:
    policy = load_policy(tiny_source, TINY, device="cpu")
    with policy.model.disable_adapter():
        base = sequence_logprobs(policy, IDS)
    assert sequence_logprobs(policy, IDS) == base


def test_same_seed_starts_the_same_adapter(tiny_source: BaseModelSource) -> None:
    torch.manual_seed(1)
    first = load_policy(tiny_source, TINY, device="cpu").parameters()
    torch.manual_seed(2)
    second = load_policy(tiny_source, TINY, device="cpu").parameters()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_named_modules_alone_get_an_adapter(tiny_source: BaseModelSource) -> None:
    settings = TINY.model_copy(
        update={"adapter": TINY.adapter.model_copy(update={"target_modules": ("q_proj", "lm_head")})}
    )
    names = load_policy(tiny_source, settings, device="cpu").parameters()
    assert {name.split(".")[-3] for name in names} == {"q_proj"}


def test_sequence_logprobs_are_the_models(policy: PolicyModel, settings: PolicySettings) -> None:
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([IDS])).logits[0]
    expected = logits.log_softmax(1)[:-1].gather(1, torch.tensor(IDS[1:])[:, None]).squeeze(1)
    assert sequence_logprobs(policy, IDS) == pytest.approx(expected.tolist(), abs=1e-5)


def test_fused_layer_equals_pefts(policy: PolicyModel) -> None:
    """Values and gradients of one layer, with and without the adapter."""
    layer = policy.base.base_model.layers[0].mlp.up_proj
    fused = layer.forward
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    held = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    outputs = [fused(x), LoraLinear.forward(layer, x)]
    upstream = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(2))
    slopes = [torch.autograd.grad((y * upstream).sum(), held) for y in outputs]
    torch.testing.assert_close(outputs[0], outputs[1])
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b)
    with policy.model.disable_adapter():
        assert torch.equal(layer(x), layer.base_layer(x))
    assert all(p.requires_grad for p in policy.parameters().values())
