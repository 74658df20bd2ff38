"""Where a chat template puts what the policy sampled, on token ids.

Knows the tokenizer and its template only. Invariants: a span is located by rendering, never by
searching for text; what cannot be located exactly raises NotLocatedError with a reason.

Each assistant message k becomes a turn: the ids the policy read, render(messages[:k]) with the
generation prompt, and the ids it sampled, what render(messages[:k+1]) adds, up to and including the
end-of-turn token. Rendering each turn with nothing after it is what keeps templates exact that
drop earlier reasoning: the next turn's prompt then no longer extends this row, and the rows split.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PARTS_OF_A_TURN = ("tool_calls", "reasoning_content", "reasoning", "thinking")


class NotLocatedError(Exception):
    """The sampled tokens cannot be told from the messages; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant message as ids: what was read, and what was sampled after it."""

    message_index: int
    prompt: list[int]
    completion: list[int]


def sampled_turns(
    document: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    indices: Collection[int],
    notes: list[str],
) -> list[Turn]:
    """Locate the assistant messages `indices` of a trace; raises NotLocatedError."""
    messages = [_plain(message, notes) for message in document["messages"]]
    chat = _Chat(tokenizer, document.get("tools") or None)
    turns = [chat.turn(messages[: index + 1]) for index in sorted(indices)]
    if document.get("status") == "truncated" and turns:
        turns[-1] = chat.without_end(turns[-1])
    return [turn for turn in turns if turn.completion]


def _plain(message: Mapping[str, Any], notes: list[str]) -> Message:
    """Bring a message to what templates expect, as inference servers do before rendering.

    Text parts are joined by newlines, null content is empty, JSON arguments of tool calls become
    objects.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
            raise NotLocatedError("content_not_text")
        if len(content) > 1 and "content_parts_joined" not in notes:
            notes.append("content_parts_joined")
        content = "\n".join(part["text"] for part in content)
    plain["content"] = content or ""
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> Message:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            raise NotLocatedError("tool_arguments_not_json") from None
    return {**call, "function": function}


class _Chat:
    """One tokenizer's template, with one trace's tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        if not tokenizer.chat_template:
            raise NotLocatedError("no_chat_template")
        template = tokenizer.get_chat_template(tools=tools)
        self._marked = bool(_MARKED.search(template))
        self._special = {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        } | set(tokenizer.all_special_ids)

    def turn(self, messages: Sequence[Message]) -> Turn:
        """Locate the last message, an assistant's."""
        index = len(messages) - 1
        full = self._ids(messages)
        start, end = self._marked_span(messages, full) or self._prefix_span(messages, full)
        end = self._end_of_turn(full, start, end)
        self._check_complete(messages, full)
        return Turn(index, full[:start], full[start:end])

    def without_end(self, turn: Turn) -> Turn:
        """Take back the end-of-turn token of a turn that was cut off before it."""
        return Turn(turn.message_index, turn.prompt, turn.completion[:-1])

    def _prefix_span(self, messages: Sequence[Message], full: list[int]) -> tuple[int, int]:
        prompt = self._ids(messages[:-1], add_generation_prompt=True)
        if full[: len(prompt)] != prompt:
            raise NotLocatedError("template_prompt_is_no_prefix")
        return len(prompt), len(full)

    def _marked_span(self, messages: Sequence[Message], full: list[int]) -> tuple[int, int] | None:
        """Span of the last message by the template's generation markers, None if it has none.

        A token that begins in the generation prompt and ends in the marked text was sampled by
        nobody; such a turn is refused.
        """
        if not self._marked:
            return None
        rendered = self._render(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        mask = rendered["assistant_masks"]
        if 1 not in mask:
            return None
        end = len(mask) - mask[::-1].index(1)
        start = end
        while start and mask[start - 1]:
            start -= 1
        text = self._render(messages, tokenize=False)
        prompt = self._render(messages[:-1], tokenize=False, add_generation_prompt=True)
        if text.startswith(prompt) and rendered["offset_mapping"][start][0] < len(prompt):
            raise NotLocatedError("token_across_prompt_and_turn")
        return start, end

    def _end_of_turn(self, full: list[int], start: int, end: int) -> int:
        """End the span after its last special token; what follows is the template's."""
        if end < len(full) and full[end - 1] not in self._special and full[end] in self._special:
            return end + 1
        for place in range(end - 1, start - 1, -1):
            if full[place] in self._special:
                return place + 1
        raise NotLocatedError("no_end_of_turn_token")

    def _check_complete(self, messages: Sequence[Message], full: list[int]) -> None:
        """Refuse a turn of which the template leaves out something that was sampled."""
        last = messages[-1]
        for part in _PARTS_OF_A_TURN:
            if last.get(part):
                without = {key: value for key, value in last.items() if key != part}
                if self._ids([*messages[:-1], without]) == full:
                    raise NotLocatedError(f"template_drops_{part}")
        text = self._render(messages, tokenize=False)
        prompt = self._render(messages[:-1], tokenize=False, add_generation_prompt=True)
        turn = text.removeprefix(prompt)
        if str(last["content"]).strip() not in turn:
            raise NotLocatedError("template_changes_content")

    def _ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        return list(self._render(messages, tokenize=True, return_dict=True, **options)["input_ids"])

    def _render(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), tools=self._tools, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise NotLocatedError(f"template_refuses: {error}") from error
