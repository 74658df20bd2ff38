"""Compiled norms and MLPs: the same gradient, the same probe; without a compiler, everything as before."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch

from service.adapters.store import AdapterStore
from service.settings import Settings
from tests.trainer.batches import TINY, distance, gradient, random_batch, shake, with_objective
from trainer import compiling
from trainer.policy import PolicyModel
from trainer.publish import probe_logprobs
from trainer.restore import Restorer


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled earlier, and no pool of processes that compile."""
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    with config.patch(compile_threads=1):
        yield


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("YORO_TEST_OPTIONS" not in os.environ, reason="compiles for minutes: make test-options")
def test_gradient_is_that_of_the_eager_model_whatever_the_lengths(policy: PolicyModel) -> None:
    settings = with_objective(gate="none")  # with the reference pass: no gradient, adapter switched off
    settings = settings.model_copy(
        update={"sequences": TINY.sequences.model_copy(update={"token_budget": 64})}
    )
    batches = [random_batch(seed, 9) for seed in (1, 2, 3)]
    plain = [gradient(policy, each, settings)[0] for each in batches]
    probe = probe_logprobs(policy)
    assert compiling.compile_decoder(policy)
    assert policy.compiled
    for each, expected in zip(batches, plain, strict=True):
        found, result = gradient(policy, each, settings)
        assert result.metrics["n_micro_batches"] > 1
        assert 0 < distance(found, expected) < 1e-4
    assert probe_logprobs(policy) == probe
    with torch.compiler.set_stance("fail_on_recompile"):
        gradient(policy, random_batch(4, 9), settings)
    policy.kept_tokens = 0  # activations are recomputed
    assert distance(gradient(policy, batches[0], settings)[0], plain[0]) < 1e-4


def test_without_a_compiler_the_trainer_s_base_is_as_before(
    policy: PolicyModel, tiny_folder: Path, tmp_path: Path
) -> None:
    from torch._inductor import config

    settings = Settings(data=tmp_path, model_root=tiny_folder.parent, compile_base=True)
    restorer = Restorer(AdapterStore(settings.store_url), settings)
    with config.patch({"cpp.cxx": ("/nonexistent/compiler",)}), structlog.testing.capture_logs() as logs:
        found = restorer.base(TINY.model_copy(update={"base_model": f"./{tiny_folder.name}"}))
    assert [entry["event"] for entry in logs] == ["loading_base_model", "not_compiled"]
    assert not found.compiled
    shake(found)
    slopes = [gradient(each, random_batch(1), TINY)[0] for each in (found, policy)]
    assert all(torch.equal(slopes[0][name], slopes[1][name]) for name in slopes[0])
