"""The text verdict on the bundled model's own tokenizer and template."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from service.policies import locate_base_model
from tests.trainer.test_templates import USER, YO, read_with


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    pytest.importorskip("gguf")
    source = locate_base_model("smollm2-135m", None, None)
    assert source.gguf_file
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.path, gguf_file=source.gguf_file)
    return made


def test_golden_ids_of_a_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokenizer is rebuilt from the GGUF, by code that changes: other ids would be another policy."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, USER], add_generation_prompt=True, return_dict=True
    )
    assert rendered["input_ids"] == [
        1,
        9690,
        198,
        6077,
        5453,
        30,
        2,
        198,
        1,
        4093,
        198,
        6004,
        2,
        198,
        1,
        520,
        9531,
        198,
    ]
    assert tokenizer.eos_token_id == 2


def test_turns_of_the_real_template(tokenizer: PreTrainedTokenizerBase) -> None:
    found, sampled = read_with(tokenizer, USER, {**YO, "content": "Hello there."}, USER, YO)
    assert (found.verdict, found.notes) == ("text", ())
    assert sampled == [["Hello there.<|im_end|>", "yo<|im_end|>"]]
    text = tokenizer.decode(found.rows[0].input_ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\nyo<|im_end|>")


def test_text_equals_what_a_sampler_would_have_recorded(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    completion = [*tokenizer("Paris.", add_special_tokens=False)["input_ids"], 2]
    by_ids, _ = read_with(tokenizer, calls=[{"prompt_token_ids": prompt, "completion_token_ids": completion}])
    by_text, _ = read_with(tokenizer, USER, {**YO, "content": "Paris."})
    assert (by_ids.verdict, by_text.verdict) == ("ids", "text")
    assert by_ids.rows[0].input_ids.tolist() == by_text.rows[0].input_ids.tolist()
    assert by_ids.rows[0].loss_mask.tolist() == by_text.rows[0].loss_mask.tolist()


def test_turn_whose_first_token_merges_with_the_prompt_is_untrainable(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    found, _ = read_with(tokenizer, USER, {**YO, "content": "\n\nParis."})
    assert found.reason == "template_prompt_is_no_prefix"


def test_tool_calls_that_the_template_ignores_are_untrainable(tokenizer: PreTrainedTokenizerBase) -> None:
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    assert read_with(tokenizer, USER, called)[0].reason == "template_drops_tool_calls"
