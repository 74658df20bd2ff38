"""A pulled version is a stock adapter: plain peft and transformers give the trainer's logprobs."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from sqlalchemy import Engine
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from service.adapters import signing
from service.adapters.store import AdapterStore
from service.settings import Settings
from tests import training_ground
from tests.tiny_model import write_tiny_model
from tests.trainer import llama_cpp
from tests.trainer.llama_cpp import LlamaCpp
from yoro import export


@pytest.fixture
def pulled(engine: Engine, database_url: str, tmp_path: Path) -> Path:
    """Train one real step, signed, and fetch its files."""
    from trainer.restore import Restorer
    from trainer.worker import Heartbeat, Worker, leases

    write_tiny_model(tmp_path / "models" / "tiny")
    private, public = signing.make_key()
    (tmp_path / "private.pem").write_bytes(private)
    (tmp_path / "public.pem").write_bytes(public)
    settings = Settings(
        database_url=database_url, data=tmp_path / "data", model_root=tmp_path / "models",
        signing_key=tmp_path / "private.pem",
    )  # fmt: skip
    policy = training_ground.prepare_batches(engine, 1)
    store = AdapterStore(settings.store_url)
    worker = Worker(engine, store, settings, "worker", Restorer(store, settings))
    lease = leases.claim(engine, policy, "worker", 30.0)
    assert lease is not None
    with Heartbeat(engine, lease, 30.0) as heartbeat:
        assert worker.train_next(lease, heartbeat)
    (version,) = training_ground.chain(engine)[1:]
    store.download(version["folder"], tmp_path / "pulled", manifest_sha256=version["manifest_sha256"])
    return tmp_path


def logprobs(model: PreTrainedModel, folder: Path, probe: str) -> list[float]:
    ids = AutoTokenizer.from_pretrained(folder)(probe, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].float()
    return list(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist())


@pytest.mark.parametrize("how", ["peft", "transformers"])
def test_a_pulled_version_gives_the_trainer_s_logprobs(how: str, pulled: Path, engine: Engine) -> None:
    manifest = training_ground.chain(engine)[1]["manifest"]
    base = AutoModelForCausalLM.from_pretrained(pulled / "models" / "tiny", dtype=torch.float32)
    if how == "peft":
        model = PeftModel.from_pretrained(base, str(pulled / "pulled"))
    else:
        base.load_adapter(str(pulled / "pulled"))
        model = base
    model.eval()
    found = logprobs(model, pulled / "models" / "tiny", manifest["probe"]["text"])
    assert found == pytest.approx(manifest["probe"]["logprobs"], abs=1e-4)


def test_merged_weights_give_the_trainer_s_logprobs(pulled: Path, engine: Engine) -> None:
    manifest = training_ground.chain(engine)[1]["manifest"]
    export.write_merged(pulled / "pulled", str(pulled / "models" / "tiny"), pulled / "merged")
    model = AutoModelForCausalLM.from_pretrained(pulled / "merged", dtype=torch.float32)
    found = logprobs(model, pulled / "merged", manifest["probe"]["text"])
    assert found == pytest.approx(manifest["probe"]["logprobs"], abs=1e-4)


def test_a_gguf_lora_has_every_delta_in_the_order_of_a_gguf_base(pulled: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    shape = export.shape_of(pulled / "models" / "tiny" / "config.json")
    adapter = load_file(pulled / "pulled" / "adapter_model.safetensors")
    assert export.write_gguf(pulled / "pulled", shape, pulled / "lora.gguf") == len(adapter)
    reader = gguf.GGUFReader(pulled / "lora.gguf")
    stored = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    assert reader.get_field("general.type").contents() == "adapter"
    assert reader.get_field("adapter.lora.alpha").contents() == 32.0
    undo = LlamaTensorProcessor()._reverse_permute_weights
    for ours, theirs, heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2), ("v_proj", "attn_v", 0)):
        key = f"base_model.model.model.layers.1.self_attn.{ours}"
        delta = adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
        name = f"blk.1.{theirs}.weight"
        found = stored[f"{name}.lora_b"] @ stored[f"{name}.lora_a"]
        assert np.allclose(undo(found, 4, heads) if heads else found, delta)


def test_the_real_llama_cpp_gives_the_trainer_s_logprobs(pulled: Path, engine: Engine) -> None:
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp: the real llama.cpp")
    manifest = training_ground.chain(engine)[1]["manifest"]
    tiny = pulled / "models" / "tiny"
    export.write_gguf(pulled / "pulled", export.shape_of(tiny / "config.json"), pulled / "lora.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer(manifest["probe"]["text"])["input_ids"]
    base = llama_cpp.write_base(tiny, pulled / "base.gguf")
    server = LlamaCpp(base, [pulled / "lora.gguf"], letter=tokenizer.convert_tokens_to_ids("a"))
    # Adapter and base alternate over one prompt: cache_prompt false keeps them apart (CASES.md, 6).
    found, bare = zip(
        *(
            [server.next_logprobs(ids[:end], lora)[ids[end]] for lora in (0, None)]
            for end in range(1, len(ids))
        ),
        strict=True,
    )
    assert found == pytest.approx(manifest["probe"]["logprobs"], abs=1e-4)
    assert bare != pytest.approx(found, abs=1e-3)


def test_a_version_of_an_installation_with_a_key_is_signed(pulled: Path, engine: Engine) -> None:
    from yoro.signature import BadSignature, load_verify_key, verify_signature

    manifest = training_ground.chain(engine)[1]["manifest"]
    key = load_verify_key(pulled / "public.pem")
    verify_signature(manifest, key)
    with pytest.raises(BadSignature):
        verify_signature(manifest | {"parent": 5}, key)
