"""Settings that decide which rollouts get a reward and reach a batch: parts of the policy's document.

Knows no database: `service.batches.gates` reads these parts, as stored, in SQL. Invariant: a change to
one of `GATE_PARTS` opens a new gate epoch, under which open rollouts are evaluated again.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _without_nulls(weights: object) -> object:
    """A PATCH takes an entry out of a map by null, as RFC 7396 has it."""
    if isinstance(weights, dict):
        return {name: weight for name, weight in weights.items() if weight is not None}
    return weights


Weights = Annotated[dict[str, NonNegative], BeforeValidator(_without_nulls)]

THIRTY_DAYS = 30 * 86_400.0
GATE_PARTS = (("reward",), ("statuses",), ("batching", "overload"))
"""Paths into the settings document that the gates read row by row."""


class Document(BaseModel):
    """A part of the settings: unknown fields are refused, values never change in place."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Reward(Document):
    """How grades become one number in [0, 1]; those named `overall` without a turn count."""

    rule: Literal["mean", "weighted", "latest", "min"] = "mean"
    weights: Weights = Field(default_factory=dict)
    """For `weighted`: grader -> weight; a grader that is not listed has weight 0."""
    criteria: Weights = Field(default_factory=dict)
    """Criterion -> weight: the value of a grade that states all of them is their weighted mean, in the
    grader's range; a grade that does not keeps its own value."""
    require: tuple[str, ...] = ()
    """Graders that must have spoken."""
    wait_seconds: NonNegative = 0.0
    """Time for further graders after the first grade."""
    settle_seconds: NonNegative = 0.0
    """Time without a new grade before the reward counts."""
    value_range: tuple[float, float] = (0.0, 1.0)
    """What graders send; mapped linearly to [0, 1]."""
    expire_seconds: Positive | None = THIRTY_DAYS
    """Age at which a rollout that still waits for its reward is given up; null: never."""
    grade_expire_seconds: Positive | None = THIRTY_DAYS
    """Age at which grades whose trace never came are removed; null: never."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rule == "weighted" and not any(self.weights.values()):
            raise ValueError("rule `weighted` needs `weights` with at least one above 0")
        if self.criteria and not any(self.criteria.values()):
            raise ValueError("`criteria` needs at least one weight above 0")
        low, high = self.value_range
        if not low < high:
            raise ValueError("value_range must be [low, high] with low < high")
        return self


class Overload(Document):
    """Which rollouts are trained when more become ready than batches can take; never chosen by reward."""

    take: Literal["oldest", "newest", "sample"] = "oldest"
    """`sample`: by a hash of the trace's id."""
    backlog_batches: Annotated[int, Field(ge=1)] | None = None
    """Batches' worth of ready rollouts beyond which the others become `not_sampled`; null: none do, and
    what is not taken in time goes stale."""


class Batching(Document):
    """When a batch is formed."""

    size: int = Field(32, ge=2, le=4096)
    min_size: int = Field(2, ge=2)
    """Least size of a partial batch."""
    max_wait_seconds: Positive | None = None
    """Age of the oldest ready rollout at which a partial batch goes; null: only full batches."""
    max_ready_batches: int = Field(1, ge=1)
    """Batches waiting for the trainer before assembly pauses."""
    max_staleness: int = Field(8, ge=0)
    overload: Overload = Overload()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_size > self.size:
            raise ValueError("min_size must not exceed size")
        return self


class Statuses(Document):
    """What becomes of rollouts whose agent says they did not complete."""

    failed: Literal["exclude", "train"] = "exclude"
    aborted: Literal["exclude", "train"] = "exclude"
    truncated: Literal["exclude", "train"] = "train"


class Promotion(Document):
    """How a new version becomes the one that serves."""

    mode: Literal["auto", "manual", "gated"] = "auto"
    """`auto`: every step's version is promoted at once; `manual`: somebody promotes it; `gated`: the
    newest version is, once it passes everything below and is not tainted."""
    max_ahead_of_promoted: int = Field(4, ge=1)
    """Steps that training may be ahead of what serves, unless `auto`, before it waits."""
    max_kl: Positive | None = None
    """Gate: the step's divergence from version 0 (metric `kl_ref`)."""
    min_net_reward: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Gate: mean of reward minus baseline over the version's batch."""
    hook_url: Annotated[str, Field(pattern=r"^https?://", max_length=2000)] | None = None
    """Gate: asked with the candidate, answers `{"pass": true, "metrics": {}}`; public addresses only."""
    hook_command: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,64}$")] | None = None
    """Gate: name of a command of the server's setting `YORO_PROMOTION_COMMANDS`."""
    hook_timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
