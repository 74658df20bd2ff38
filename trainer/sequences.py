"""From a rollout's trace to token rows with an exact loss mask, and the verdict on it.

Knows no model, no advantage and no database. Invariants: token ids that came with the trace are
never re-tokenised; a token is in the loss mask only if the policy sampled it; whatever cannot be
located exactly is not trained, and says why.

    calls with ids ──────────────┐
                                 ├─> turns (prompt ids, sampled ids) ─> rows ─> verdict
    messages ─> trainer.templates┘
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from service.policies import Sequences
from service.schemas import has_token_ids
from trainer.templates import NotLocatedError, Turn, sampled_turns

Verdict = Literal["exact", "ids", "text", "untrainable"]


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence, [T] each.

    `input_ids` int64; `loss_mask` bool, True: sampled by the policy; `sampler_logprobs` float32,
    NaN: not known; `temperature` float32, of the call that sampled the token, 1 elsewhere; `messages`
    int64, index of the message that the sampled token is of, -1: of none that is known; None: all so.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    sampler_logprobs: torch.Tensor
    temperature: torch.Tensor
    messages: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RolloutRows:
    """All rows of one rollout; they share its advantage and its denominator.

    `versions` has the policy version that sampled each row. `reason` is empty unless untrainable.
    """

    rows: tuple[Row, ...]
    verdict: Verdict
    reason: str
    notes: tuple[str, ...]
    policy_tokens: int
    versions: tuple[int, ...]

    def token_messages(self) -> list[int]:
        """Message index of each policy token, in the order of the rows; -1 where it is not known."""
        return [
            message
            for row in self.rows
            for message in (
                [-1] * int(row.loss_mask.sum())
                if row.messages is None
                else row.messages[row.loss_mask].tolist()
            )
        ]


class _UntrainableError(Exception):
    """Ends the reading of a trace; the message is the reason."""


@dataclass(frozen=True, slots=True)
class _Sampling:
    """How one call was sampled."""

    version: int
    temperature: float
    raw: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """One call: what the policy read, what it sampled, in which message, and how."""

    message: int
    prompt: list[int]
    completion: list[int]
    logprobs: list[float] | None
    sampling: _Sampling


def build_rows(
    document: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, settings: Sequences
) -> RolloutRows:
    """Turn a normalised trace (design/api.md) into rows and a verdict (design/training.md).

    Never raises on a trace's content: a rollout that cannot be trained comes back `untrainable`
    with a reason (a code, then perhaps `: detail`) and no rows.
    """
    notes: list[str] = []
    try:
        verdict, pieces = _read(document, tokenizer, notes)
        rows, versions = _merge(pieces)
        rows = _fit(rows, settings, notes)
    except (_UntrainableError, NotLocatedError) as refusal:
        return RolloutRows((), "untrainable", str(refusal), tuple(notes), 0, ())
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    if not tokens:
        return RolloutRows((), "untrainable", "no_policy_tokens", tuple(notes), 0, ())
    return RolloutRows(tuple(rows), verdict, "", tuple(notes), tokens, tuple(versions))


def _read(
    document: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, notes: list[str]
) -> tuple[Verdict, list[_Piece]]:
    calls = [call for call in document.get("calls") or () if isinstance(call, Mapping)]
    evident = [call for call in calls if has_token_ids(call)]
    if evident:
        if len(evident) < len(calls):
            notes.append(f"calls_without_ids:{len(calls) - len(evident)}")
        pieces = [_evident_piece(document, call, tokenizer, notes) for call in evident]
        exact = all(piece.logprobs is not None for piece in pieces)
        return ("exact" if exact else "ids"), pieces
    if not any(m.get("role") == "assistant" for m in document.get("messages") or ()):
        raise _UntrainableError("no_assistant_turn")
    samplings = _message_samplings(document, calls, notes)
    turns = sampled_turns(document, tokenizer, set(samplings), notes)
    return "text", [_text_piece(turn, samplings[turn.message_index]) for turn in turns]


def _message_samplings(
    document: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], notes: list[str]
) -> dict[int, _Sampling]:
    """How each assistant message was sampled; calls without ids still say it for theirs."""
    by_message = {c["message_index"]: c for c in calls if c.get("message_index") is not None}
    return {
        index: _sampling(document, by_message.get(index, {}), notes)
        for index, message in enumerate(document["messages"])
        if message.get("role") == "assistant"
    }


def _text_piece(turn: Turn, sampling: _Sampling) -> _Piece:
    return _Piece(turn.message_index, turn.prompt, turn.completion, None, sampling)


def _evident_piece(
    document: Mapping[str, Any],
    call: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    notes: list[str],
) -> _Piece:
    sampling = _sampling(document, call, notes)
    prompt, completion = list(call["prompt_token_ids"]), list(call["completion_token_ids"])
    limit = len(tokenizer)
    if not all(isinstance(i, int) and 0 <= i < limit for i in (*prompt, *completion)):
        raise _UntrainableError("token_ids_outside_vocabulary")
    logprobs, defect = _usable_logprobs(call, len(completion), sampling)
    if defect:
        _note(notes, f"logprobs_recomputed: {defect}")
    return _Piece(call.get("message_index", -1), prompt, completion, logprobs, sampling)


def _usable_logprobs(
    call: Mapping[str, Any], tokens: int, sampling: _Sampling
) -> tuple[list[float] | None, str]:
    """Return the call's logprobs, or None and what is wrong with them."""
    values = call.get("logprobs")
    if not values:
        return None, "missing"
    if len(values) != tokens:
        return None, "lengths disagree"
    if not all(isinstance(v, int | float) and isfinite(v) and v <= 1e-6 for v in values):
        return None, "not finite and at most 0"
    if sampling.raw and sampling.temperature != 1:
        return None, f"raw at temperature {sampling.temperature:g}"
    return [float(v) for v in values], ""


def _sampling(document: Mapping[str, Any], call: Mapping[str, Any], notes: list[str]) -> _Sampling:
    """Read a call's own settings, else the trace's; refuse what the objective cannot weigh.

    Unstated top_p, top_k and constraints count as off, an unstated temperature as 1 with a note.
    Truncated or constrained sampling renormalises, so that the ratio of policies is biased by the
    mass that was cut (TRL issue 6789).
    """
    stated = {**(document.get("sampling") or {})}
    stated |= {k: v for k, v in call.items() if k in _SAMPLING_FIELDS and v is not None}
    version = call.get("policy_version")
    version = document.get("policy_version") if version is None else version
    if version is None:
        raise _UntrainableError("no_version")
    temperature = stated.get("temperature")
    if temperature is None:
        _note(notes, "temperature_unstated: 1 assumed")
        temperature = 1.0
    _check_support(stated, float(temperature))
    raw = call.get("logprobs_mode") != "processed"
    return _Sampling(int(version), float(temperature), raw)


_SAMPLING_FIELDS = frozenset({"temperature", "top_p", "top_k", "constrained"})


def _check_support(stated: Mapping[str, Any], temperature: float) -> None:
    if not isfinite(temperature) or temperature < 0:
        raise _UntrainableError("temperature_invalid")
    if temperature == 0:
        raise _UntrainableError("greedy")
    if stated.get("top_p") is not None and stated["top_p"] < 1:
        raise _UntrainableError("top_p")
    if stated.get("top_k") is not None and stated["top_k"] > 0:
        raise _UntrainableError("top_k")
    if stated.get("constrained"):
        raise _UntrainableError("constrained")


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _merge(pieces: Iterable[_Piece]) -> tuple[list[Row], list[int]]:
    """Join a call to the row before while its prompt extends that row's ids exactly, else split.

    A call of another version, too, starts a row: its logprobs may have to be recomputed under that
    version's adapter. Shared prefixes are in the loss once, in the row that sampled them.
    """
    rows: list[Row] = []
    versions: list[int] = []
    for piece in pieces:
        known = rows[-1].input_ids.tolist() if rows else []
        extends = (
            bool(rows) and piece.sampling.version == versions[-1] and piece.prompt[: len(known)] == known
        )
        if extends:
            rows[-1] = _joined(rows[-1], _row(piece, len(known)))
        else:
            rows.append(_row(piece, 0))
            versions.append(piece.sampling.version)
    return rows, versions


def _row(piece: _Piece, skip: int) -> Row:
    prompt = piece.prompt[skip:]
    read, sampled = len(prompt), len(piece.completion)
    logprobs = piece.logprobs if piece.logprobs is not None else [nan] * sampled
    return Row(
        torch.tensor(prompt + piece.completion, dtype=torch.int64),
        torch.tensor([False] * read + [True] * sampled),
        torch.tensor([nan] * read + logprobs, dtype=torch.float32),
        torch.tensor([1.0] * read + [piece.sampling.temperature] * sampled, dtype=torch.float32),
        torch.tensor([-1] * read + [piece.message] * sampled, dtype=torch.int64),
    )


def _joined(first: Row, second: Row) -> Row:
    return Row(*map(torch.cat, zip(_columns(first), _columns(second), strict=True)))


def _columns(row: Row) -> tuple[torch.Tensor, ...]:
    assert row.messages is not None, "every row made here has them"
    return row.input_ids, row.loss_mask, row.sampler_logprobs, row.temperature, row.messages


def _fit(rows: Sequence[Row], settings: Sequences, notes: list[str]) -> list[Row]:
    limit = settings.max_tokens
    longest = max((len(row.input_ids) for row in rows), default=0)
    if longest > limit:
        if settings.too_long == "reject":
            raise _UntrainableError(f"too_long: {longest} tokens, at most {limit}")
        notes.append(f"truncated_left: {longest} tokens to {limit}")
    return [_predictable(_last(row, limit)) for row in rows]


def _last(row: Row, limit: int) -> Row:
    return Row(*(column[-limit:] for column in _columns(row)))


def _predictable(row: Row) -> Row:
    """Take the first token out of the mask: nothing before it predicts it."""
    mask = row.loss_mask.clone()
    mask[:1] = False
    return replace(row, loss_mask=mask)
