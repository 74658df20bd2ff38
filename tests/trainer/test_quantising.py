"""A base in four bits: near the full one, a quarter of its bytes, the same bits each time."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from sqlalchemy import Engine
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, GgufConfig

from service.adapters.store import AdapterStore
from service.errors import Unavailable
from service.policies import BaseModelSource, PolicySettings
from service.settings import Settings
from tests import training_ground
from tests.tiny_model import write_tiny_model
from tests.trainer import llama_cpp
from tests.trainer.batches import TINY, distance, gradient, random_batch, random_row, rollout, shake
from tests.trainer.test_worker import train
from trainer import quantising
from trainer.policy import PolicyModel, load_policy, with_adapter
from trainer.publish import probe_logprobs
from trainer.restore import Restorer
from trainer.step import TrainingBatch
from trainer.worker import Worker

needs_library = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: pip install 'yoro[quant]'"
)


def settings_of(quantization: str, **sequences: Any) -> PolicySettings:
    document = TINY.model_dump(mode="json")
    document["adapter"]["base_quantization"] = quantization
    document["objective"]["gate"] = "none"
    return PolicySettings.model_validate(document | {"sequences": document["sequences"] | sequences})


def loaded(source: BaseModelSource, quantization: str, **sequences: Any) -> PolicyModel:
    policy = load_policy(source, settings_of(quantization, **sequences), device="cpu")
    shake(policy)
    return policy


def linears(policy: PolicyModel) -> list[Any]:
    """The decoder's own linear layers, under their adapters."""
    return [m.base_layer for m in policy.base.base_model.modules() if isinstance(m, LoraLinear)]


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def batch() -> TrainingBatch:
    """Rollouts whose ratio is 1: what random logprobs would weigh says nothing of the base."""
    generator = torch.Generator().manual_seed(3)
    members = []
    for number in range(6):
        made = random_row(generator, 8, 12)
        made.sampler_logprobs.fill_(torch.nan)
        members.append(rollout(number, [made], 0.5 - number / 4))
    return TrainingBatch(members, 6, 12.0)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> BaseModelSource:
    """A model whose layers all have inputs in whole blocks."""
    folder = write_tiny_model(tmp_path_factory.mktemp("wide"), width=quantising.BLOCK)
    return BaseModelSource("folder", "wide", str(folder))


@needs_library
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradient_is_near_that_over_the_full_base(wide: BaseModelSource, precision: str) -> None:
    found = {}
    for quantization in ("none", "nf4"):
        policy = loaded(wide, quantization, precision=precision)
        each, result = gradient(policy, batch(), settings_of(quantization))
        assert result.outcome == "stepped"
        found[quantization] = torch.cat([each[name].flatten() for name in sorted(each)])
    assert 0.7 < float(cosine_similarity(found["none"], found["nf4"], dim=0)) < 0.9999


@needs_library
def test_gradient_is_that_over_the_unpacked_weights(wide: BaseModelSource) -> None:
    """What is lost is lost in packing; products and gradients lose nothing more."""
    packed, plain = loaded(wide, "nf4"), loaded(wide, "none")
    with torch.no_grad():
        for here, there in zip(linears(plain), linears(packed), strict=True):
            here.weight.copy_(quantising.dense(there.weight, there.quant_state))
    slopes = [gradient(policy, random_batch(1), settings_of("none"))[0] for policy in (packed, plain)]
    assert distance(*slopes) == 0.0


@needs_library
def test_linear_layers_take_a_quarter_and_the_rest_stays(wide: BaseModelSource) -> None:
    full, packed = (loaded(wide, q, precision="bf16") for q in ("none", "nf4"))
    whole = sum(size(layer.weight) for layer in linears(full))
    states = [layer.quant_state for layer in linears(packed)]
    parts = sum(size(layer.weight) for layer in linears(packed))
    parts += sum(size(state.absmax) + size(state.state2.absmax) for state in states)
    assert parts / whole == pytest.approx(0.25, abs=0.02)
    assert packed.head().weight.dtype == torch.bfloat16
    assert packed.base.get_input_embeddings().weight.dtype == torch.bfloat16
    assert {p.dtype for p in packed.parameters().values()} == {torch.float32}


@needs_library
def test_same_base_same_bits(wide: BaseModelSource) -> None:
    policies = [loaded(wide, "nf4", precision="bf16") for _ in range(2)]
    slopes = [gradient(policy, random_batch(1), settings_of("nf4"))[0] for policy in policies]
    assert all(torch.equal(slopes[0][name], slopes[1][name]) for name in slopes[0])
    assert probe_logprobs(policies[0]) == probe_logprobs(policies[1])


@needs_library
def test_layers_without_an_adapter_are_packed_too(wide: BaseModelSource) -> None:
    settings = settings_of("nf4")
    adapter = settings.adapter.model_copy(update={"target_modules": ("q_proj",)})
    policy = load_policy(wide, settings.model_copy(update={"adapter": adapter}), device="cpu")
    layer = policy.base.base_model.layers[0].mlp.down_proj
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1), requires_grad=True)
    matrix = quantising.dense(layer.weight, layer.quant_state)
    torch.testing.assert_close(layer(x), x @ matrix.T)
    (slope,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(slope, matrix.sum(0).expand_as(x))


@needs_library
def test_layers_that_are_no_whole_blocks_stay_as_they_are(tiny_source: BaseModelSource) -> None:
    policy = loaded(tiny_source, "nf4")
    kinds = {layer.in_features: type(layer).__name__ for layer in linears(policy)}
    assert kinds == {32: "Linear", 64: "Linear4bit"}


@needs_library
def test_a_gguf_file_is_packed_as_the_folder_that_it_was_made_of(
    wide: BaseModelSource, tmp_path: Path
) -> None:
    file = llama_cpp.write_base(Path(wide.path), tmp_path / "wide.gguf")
    expected = loaded(wide, "nf4")
    base = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa",
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    policy = with_adapter(base, expected.tokenizer, settings_of("nf4"), torch.device("cpu"))
    shake(policy)
    assert {type(layer).__name__ for layer in linears(policy)} == {"Linear4bit"}
    assert probe_logprobs(policy) == pytest.approx(probe_logprobs(expected), abs=1e-5)


@needs_library
def test_the_manifest_says_so_and_another_trainer_goes_on(
    wide: BaseModelSource, engine: Engine, database_url: str, tmp_path: Path
) -> None:
    shutil.copytree(wide.path, tmp_path / "tiny")
    settings = Settings(database_url=database_url, data=tmp_path / "data", model_root=tmp_path)
    adapter = {"rank": 4, "base_quantization": "nf4"}
    policy = training_ground.prepare_batches(engine, 2, adapter=adapter)
    store = AdapterStore(settings.store_url)
    for _ in range(2):
        train(Worker(engine, store, settings, "worker", Restorer(store, settings)), policy)
    training_ground.check_chain(engine, store, 2, tmp_path / "checked")
    manifests = [row["manifest"] for row in training_ground.chain(engine)[1:]]
    assert [manifest["adapter"]["base_quantization"] for manifest in manifests] == ["nf4", "nf4"]


def test_a_missing_library_is_named_with_the_setting(
    tiny_source: BaseModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(Unavailable, match=r"adapter\.base_quantization is nf4.*yoro\[quant\]"):
        loaded(tiny_source, "nf4")


def test_a_split_base_is_refused(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)
    restorer = Restorer(AdapterStore(settings.store_url), settings, lambda policy, settings: None)
    with pytest.raises(Unavailable, match="YORO_SHARD_BASE"):
        restorer.base(settings_of("nf4"))
