"""Chunked log-probabilities against the whole softmax."""

import pytest
import torch

from trainer import logprobs
from trainer.logprobs import OutputHead, token_logprobs


def naive(
    hidden: torch.Tensor, head: OutputHead, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ head.weight.T
    logits = (logits + head.bias if head.bias is not None else logits) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    every = (logits / temperature[:, None]).log_softmax(1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(1)


@pytest.mark.parametrize("rows_a_chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap"), [(False, 1.0, None), (True, 0.5, None), (True, 2.0, 3.0)]
)
def test_values_and_gradient_equal_those_of_the_whole_softmax(
    monkeypatch: pytest.MonkeyPatch, rows_a_chunk: int, bias: bool, scale: float, softcap: float | None
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", rows_a_chunk * 4 * 50)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 8, generator=generator, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator)
    head = OutputHead(weight, torch.randn(50, generator=generator) if bias else None, scale, softcap)
    targets = torch.randint(0, 50, (7,), generator=generator)
    temperature = torch.linspace(0.5, 2.0, 7)
    upstream = torch.randn(7, generator=generator)
    found, entropy = token_logprobs(hidden, head, targets, temperature)
    expected, expected_entropy = naive(hidden, head, targets, temperature)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    assert not entropy.requires_grad
    (slope,) = torch.autograd.grad(found @ upstream, hidden)
    (expected_slope,) = torch.autograd.grad(expected @ upstream, hidden)
    torch.testing.assert_close(slope, expected_slope)


def test_bf16_hidden_states_give_fp32_logprobs() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 8, generator=generator).bfloat16().requires_grad_()
    head = OutputHead(torch.randn(50, 8, generator=generator).bfloat16())
    targets, temperature = torch.arange(5), torch.ones(5)
    found, _ = token_logprobs(hidden, head, targets, temperature)
    exact = OutputHead(head.weight.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, naive(hidden.float(), exact, targets, temperature)[0])
    (slope,) = torch.autograd.grad(found.sum(), hidden)
    assert slope.dtype == torch.bfloat16


def test_no_tokens_is_no_error() -> None:
    found, entropy = token_logprobs(
        torch.zeros(0, 8, requires_grad=True),
        OutputHead(torch.randn(50, 8)),
        torch.zeros(0).long(),
        torch.ones(0),
    )
    assert found.shape == entropy.shape == (0,)
