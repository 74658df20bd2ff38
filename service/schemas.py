"""Wire types of the contract (design/api.md), shared by HTTP, Kafka and imports.

Knows no storage. Invariants: everything that a client sends passes one of these types first;
numbers are JSON numbers (never strings or booleans), never NaN or infinite; ids are plain.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from service.policies import PolicyName, PolicySettings
from service.presets import PresetName

Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:@-]{1,200}$")]
Label = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
Version = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)?", re.ASCII)


def _is_rfc3339(value: object) -> object:
    """Refuse numbers: whether seconds, milli- or microseconds were meant would be a guess."""
    if isinstance(value, datetime) or (isinstance(value, str) and _RFC3339.fullmatch(value)):
        return value
    raise ValueError("must be a time as RFC 3339 has it, a string like 2026-11-29T12:00:00Z")


def _has_utc(moment: datetime) -> datetime:
    """Refuse what lies outside the years 1 to 9999 once its offset is taken off."""
    try:
        moment.astimezone(UTC) if moment.tzinfo else None
    except OverflowError:
        raise ValueError("lies outside the years 1 to 9999 in UTC") from None
    return moment


Moment = Annotated[datetime, BeforeValidator(_is_rfc3339), AfterValidator(_has_utc)]


class Wire(BaseModel):
    """A document from outside; a misspelt field is an error, not a loss."""

    model_config = ConfigDict(extra="forbid")


class Message(BaseModel):
    """One chat message; fields beyond these are kept as they came."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Sampling(Wire):
    """How the policy's tokens were drawn."""

    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, strict=True)] | None = None
    constrained: Flag | None = None


class Call(Wire):
    """One model call: the exact tokens behind one assistant message."""

    message_index: Annotated[int, Field(ge=0, strict=True)]
    prompt_token_ids: list[TokenId] | None = None
    completion_token_ids: list[TokenId] | None = None
    logprobs: list[Number | None] | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    policy_version: Version | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, strict=True)] | None = None
    finish_reason: Label | None = None


def has_token_ids(call: Mapping[str, Any]) -> bool:
    """Tell whether a call of a normalised trace says what was read and sampled, token by token."""
    return bool(call.get("prompt_token_ids")) and bool(call.get("completion_token_ids"))


class EmbeddedGrade(Wire):
    """A grade that came along with its trace."""

    grader: Identifier
    value: Number
    name: Identifier = "overall"
    comment: str | None = None
    graded_at: Moment | None = None
    grader_version: Label | None = None


class Trace(Wire):
    """One attempt at one task, as its agent posts it."""

    policy: PolicyName | None = None
    trace_id: Identifier
    policy_version: Version | None = None
    model: Label | None = None
    adapter_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    task_id: Label | None = None
    session_id: Label | None = None
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    context: dict[str, Any] = Field(default_factory=dict)
    sampling: Sampling = Field(default_factory=Sampling)
    calls: list[Call] = Field(default_factory=list)
    status: Literal["completed", "failed", "aborted", "truncated"] = "completed"
    started_at: Moment | None = None
    ended_at: Moment | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    reward: EmbeddedGrade | None = None


class Grade(Wire):
    """What one grader says about one rollout."""

    policy: PolicyName | None = None
    trace_id: Identifier
    grader: Identifier
    value: Number | None = None
    name: Identifier = "overall"
    turn: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] | None = None
    criteria: dict[str, Any] | None = None
    comment: str | None = None
    graded_at: Moment | None = None
    grader_version: Label | None = None
    void: Flag = False


class TraceBatch(BaseModel):
    """Body of `POST /v1/traces/batch`; each item is judged on its own."""

    traces: list[Trace]


class GradeBatch(BaseModel):
    """Body of `POST /v1/rewards/batch`; each item is judged on its own."""

    rewards: list[Grade]


class NewPolicy(PolicySettings):
    """`POST /v1/policies`: a name and its settings."""

    name: PolicyName
    preset: PresetName | None = None
    """A published method's objective and baseline; settings given beside it win."""


class Trainability(BaseModel):
    """Whether a rollout can be trained on, as far as its structure tells."""

    verdict: Literal["exact", "ids", "text", "untrainable"]
    reasons: list[str] = Field(default_factory=list)


class TraceAccepted(BaseModel):
    """Answer to a trace."""

    trace_id: str
    status: Literal["accepted", "duplicate"]
    trainability: Trainability
    warnings: list[str] = Field(default_factory=list)


class GradeAccepted(BaseModel):
    """Answer to a grade."""

    trace_id: str
    status: Literal["accepted", "duplicate"]
    effect: Literal["counts", "waiting_for_trace", "superseded", "late"]
    warnings: list[str] = Field(default_factory=list)


class ItemProblem(BaseModel):
    """Why one item of a batch was refused, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[dict[str, str]] = Field(default_factory=list)


class TraceResult(TraceAccepted):
    """One result of a batch of traces; a refused item has `problem` and neither status nor verdict."""

    index: int
    problem: ItemProblem | None = None


class GradeResult(GradeAccepted):
    """One result of a batch of grades; a refused item has `problem` and neither status nor effect."""

    index: int
    problem: ItemProblem | None = None
