"""Verdicts on traces that come with token ids: nothing is re-tokenised, and every refusal has a reason."""

import math
from typing import Any

import pytest
import torch

from service.policies import Sequences
from tests.tiny_model import tiny_tokenizer
from trainer.sequences import RolloutRows, build_rows

TOKENIZER = tiny_tokenizer()
LIMITS = Sequences(max_tokens=64)


def call(prompt: list[int], completion: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "logprobs": [-0.5] * len(completion),
        "logprobs_mode": "raw",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        **changes,
    }


def trace(*calls: dict[str, Any], **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    return {"policy_version": 3, "messages": messages, "calls": list(calls), **changes}


def read(*calls: dict[str, Any], limits: Sequences = LIMITS, **changes: Any) -> RolloutRows:
    return build_rows(trace(*calls, **changes), TOKENIZER, limits)


def test_ids_with_logprobs_are_exact() -> None:
    found = read(call([10, 11, 12], [13, 2], logprobs=[-0.25, -1.5]))
    assert (found.verdict, found.reason, found.notes) == ("exact", "", ())
    assert (found.policy_tokens, found.versions) == (2, (3,))
    (row,) = found.rows
    assert row.input_ids.tolist() == [10, 11, 12, 13, 2]
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert row.sampler_logprobs[3:].tolist() == [-0.25, -1.5]
    assert row.sampler_logprobs[:3].isnan().all()
    assert row.input_ids.dtype == torch.int64
    assert row.sampler_logprobs.dtype == row.temperature.dtype == torch.float32


def test_ids_that_no_text_would_give_are_kept() -> None:
    """Ids win over messages, whatever these say."""
    found = read(call([200, 1, 1, 1], [255, 254]))
    assert found.rows[0].input_ids.tolist() == [200, 1, 1, 1, 255, 254]


def test_call_that_extends_the_previous_ids_stays_in_the_row() -> None:
    found = read(call([10, 11], [12, 2]), call([10, 11, 12, 2, 30, 31], [32, 2]))
    (row,) = found.rows
    assert row.input_ids.tolist() == [10, 11, 12, 2, 30, 31, 32, 2]
    assert row.loss_mask.tolist() == [False, False, True, True, False, False, True, True]
    assert (found.policy_tokens, found.versions) == (4, (3,))


def test_call_that_does_not_extend_starts_a_row_and_trains_nothing_twice() -> None:
    found = read(call([10, 11], [12, 2]), call([10, 11, 99, 2, 30], [32, 2]))
    assert [row.loss_mask.tolist() for row in found.rows] == [
        [False, False, True, True],
        [False] * 5 + [True, True],
    ]
    assert (found.policy_tokens, found.versions) == (4, (3, 3))


def test_call_of_another_version_starts_a_row() -> None:
    found = read(call([10, 11], [12, 2]), call([10, 11, 12, 2, 30], [32, 2], policy_version=4))
    assert found.versions == (3, 4)
    assert [int(row.loss_mask.sum()) for row in found.rows] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "defect"),
    [
        ({"logprobs": None}, "missing"),
        ({"logprobs": [-0.5]}, "lengths disagree"),
        ({"logprobs": [-0.5, math.nan]}, "not finite and at most 0"),
        ({"logprobs": [-0.5, -math.inf]}, "not finite and at most 0"),
        ({"logprobs": [-0.5, 0.1]}, "not finite and at most 0"),
        ({"logprobs": [-0.5, None]}, "not finite and at most 0"),
        ({"temperature": 0.7}, "raw at temperature 0.7"),
        ({"temperature": 0.7, "logprobs_mode": None}, "raw at temperature 0.7"),
    ],
)
def test_unusable_logprobs_are_recomputed(changes: dict[str, Any], defect: str) -> None:
    found = read(call([10, 11], [12, 2], **changes))
    assert found.verdict == "ids"
    assert found.notes == (f"logprobs_recomputed: {defect}",)
    assert found.rows[0].sampler_logprobs.isnan().all()
    assert found.rows[0].loss_mask.tolist() == [False, False, True, True]


def test_processed_logprobs_at_another_temperature_are_exact() -> None:
    found = read(call([10, 11], [12, 2], temperature=0.7, logprobs_mode="processed"))
    assert found.verdict == "exact"
    assert found.rows[0].temperature.tolist() == pytest.approx([1.0, 1.0, 0.7, 0.7])


def test_one_call_without_logprobs_makes_the_rollout_ids_and_keeps_the_others() -> None:
    found = read(call([10], [12, 2]), call([10, 12, 2, 9], [8], logprobs=None))
    assert found.verdict == "ids"
    assert found.rows[0].sampler_logprobs[1:3].tolist() == [-0.5, -0.5]
    assert found.rows[0].sampler_logprobs[4].isnan()


def test_call_without_ids_is_left_out_and_said() -> None:
    found = read(call([10], [12, 2]), {"message_index": 3, "temperature": 1.0})
    assert (found.verdict, found.policy_tokens) == ("exact", 2)
    assert found.notes == ("calls_without_ids:1",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temperature": 0}, "greedy"),
        ({"temperature": -1.0}, "temperature_invalid"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 50}, "top_k"),
        ({"constrained": True}, "constrained"),
        ({"prompt_token_ids": [10, 259]}, "token_ids_outside_vocabulary"),
        ({"completion_token_ids": [-1, 2]}, "token_ids_outside_vocabulary"),
    ],
)
def test_call_that_cannot_be_weighed_makes_the_rollout_untrainable(
    changes: dict[str, Any], reason: str
) -> None:
    found = read(call([10, 11], [12, 2]), call([10, 11], [12, 2]) | changes)
    assert (found.verdict, found.reason, found.rows, found.policy_tokens) == ("untrainable", reason, (), 0)


@pytest.mark.parametrize("off", [{"top_k": -1}, {"top_k": None}, {"top_p": None}, {"top_p": 1}])
def test_sampling_that_is_switched_off_is_exact(off: dict[str, Any]) -> None:
    assert read(call([10, 11], [12, 2], **off)).verdict == "exact"


def test_sampling_of_the_trace_counts_where_the_call_says_nothing() -> None:
    bare = {"prompt_token_ids": [10, 11], "completion_token_ids": [12], "logprobs": [-1.0]}
    assert read(bare, sampling={"temperature": 1.0, "top_p": 0.5}).reason == "top_p"
    assert read(bare, sampling={"temperature": 1.0}).notes == ()
    assert read(bare).notes == ("temperature_unstated: 1 assumed",)
    assert read(bare | {"top_p": 1.0}, sampling={"top_p": 0.5}).verdict == "exact"


def test_trace_without_a_version_is_untrainable() -> None:
    assert read(call([10], [12]), policy_version=None).reason == "no_version"
    assert read(call([10], [12], policy_version=0), policy_version=None).versions == (0,)


def test_rollout_that_is_too_long_is_rejected_by_default() -> None:
    found = read(call([10] * 60, [12] * 10))
    assert (found.verdict, found.reason) == ("untrainable", "too_long: 70 tokens, at most 64")


def test_truncation_keeps_the_end_and_is_said() -> None:
    found = read(call([10] * 60, [12] * 10), limits=Sequences(max_tokens=64, too_long="truncate_left"))
    assert found.notes == ("truncated_left: 70 tokens to 64",)
    assert len(found.rows[0].input_ids) == 64
    assert found.policy_tokens == 10


def test_first_token_is_never_in_the_loss() -> None:
    """Nothing predicts it: a completion longer than the limit loses its start and one token more."""
    found = read(call([10], [12] * 70), limits=Sequences(max_tokens=64, too_long="truncate_left"))
    assert found.policy_tokens == 63
    assert found.rows[0].loss_mask.tolist() == [False] + [True] * 63


def test_each_sampled_token_knows_its_message_through_joins_splits_and_cuts() -> None:
    calls = (
        call([10, 11], [12, 2], message_index=1),
        call([10, 11, 12, 2, 30], [31, 2], message_index=3),
        call([10, 99], [32, 33, 2], message_index=5),
    )
    found = read(*calls)
    assert len(found.rows) == 2
    assert found.token_messages() == [1, 1, 3, 3, 5, 5, 5]
    cut = read(*calls, limits=LIMITS.model_copy(update={"max_tokens": 16, "too_long": "truncate_left"}))
    assert cut.token_messages() == found.token_messages()
    limits = Sequences.model_construct(max_tokens=4, too_long="truncate_left")
    # the first token that is left is predicted by nothing
    assert read(*calls, limits=limits).token_messages() == [3, 3, 5, 5, 5]


def test_text_s_tokens_know_the_message_that_the_template_put_them_in() -> None:
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    messages = [*turn, turn[0], {"role": "assistant", "content": "bye"}]
    found = build_rows(
        {"policy_version": 3, "messages": messages}, TOKENIZER, Sequences.model_construct(max_tokens=200)
    )
    assert (found.verdict, found.token_messages()) == ("text", [1] * 3 + [3] * 4)
