"""Server settings: the one place that reads the environment.

Knows nothing of policies (their settings are documents in the database, see policies.py).
Every variable is `YORO_` + the field's name in capitals; deploy documentation lists them from here.
"""

from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Limits(BaseSettings):
    """Bounds on what a client may send; `GET /v1/limits` shows them."""

    model_config = SettingsConfigDict(env_prefix="YORO_LIMIT_", frozen=True)

    body_bytes: int = Field(16 << 20, gt=0)
    """Compressed size of one request body."""
    inflated_bytes: int = Field(64 << 20, gt=0)
    """Size of one request body after decompression."""
    trace_bytes: int = Field(8 << 20, gt=0)
    """Size of one trace as JSON."""
    grade_bytes: int = Field(1 << 20, gt=0)
    """Size of one grade as JSON."""
    batch_items: int = Field(1_000, gt=0)
    """Documents in one batch request."""
    messages: int = Field(50_000, gt=0)
    tokens: int = Field(2_000_000, gt=0)
    """Token ids in all calls of one trace."""
    json_depth: int = Field(64, gt=0)
    id_characters: int = Field(200, gt=0, le=200)
    queue_items: int = Field(20_000, gt=0)
    """Items waiting for the writer before intake answers 503."""
    queue_bytes: int = Field(24 << 20, gt=0)
    """Bytes that they may hold, about four for each byte that came."""
    in_flight_bytes: int = Field(24 << 20, gt=0)
    """Bytes of bodies being read and parsed, all requests together, before intake answers 503."""


class KafkaSettings(BaseSettings):
    """How Kafka is reached, and what its topics may bring; docs/kafka.md says more."""

    model_config = SettingsConfigDict(env_prefix="YORO_KAFKA_", frozen=True)

    bootstrap: str = "127.0.0.1:9092"
    """Brokers to begin with: host:port, separated by commas."""
    group: str = "yoro"
    """Consumer group that all consumers of this installation share."""
    traces_topic: str = "yoro.traces"
    rewards_topic: str = "yoro.rewards"
    dead_letter_topic: str = "yoro.dead-letter"
    prefixes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Prefix of a further pair of topics -> the policies that come through them, and through no others."""
    graded_topics: tuple[str, ...] = ()
    """Topics of traces whose embedded rewards are taken: whoever may write there may grade."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    ssl_cafile: Path | None = None
    """Certificates of the authorities that sign the brokers'; unset: the system's."""
    ssl_certfile: Path | None = None
    """This client's certificate, for mTLS."""
    ssl_keyfile: Path | None = None
    ssl_password: SecretStr | None = None
    """Of the key file."""
    ssl_check_hostname: bool = True
    session_seconds: float = Field(45.0, gt=0)
    """Silence after which the group gives a consumer's partitions to others."""
    poll_interval_seconds: float = Field(300.0, gt=0)
    """Time between two polls after which a consumer leaves the group by itself."""
    poll_messages: int = Field(500, gt=0, le=10_000)
    """Messages in one transaction."""
    oldest_seconds: float = Field(300.0, gt=0)
    """Age of the oldest unconsumed message from which on the consumer is not ready and an alert is raised."""
    dead_letter_days: float = Field(30.0, gt=0)
    """How long dead letters stay in the table."""


class Settings(BaseSettings):
    """What one installation is configured with."""

    model_config = SettingsConfigDict(env_prefix="YORO_", frozen=True)

    database_url: str = "postgresql+psycopg://postgres@127.0.0.1:5432/yoro"
    data: Path = Path("yoro-data")
    """Folder of `yoro up`: database, adapters, the admin's key."""
    adapters_url: str = ""
    """fsspec URL of the adapter store; empty: `{data}/adapters`."""
    model_root: Path | None = None
    """Base models given as a folder or a GGUF file lie below it; unset: hub names and bundled ones only."""
    trust_remote_code: bool = False
    encoder: str = "all-MiniLM-L6-v2"
    """Sentence encoder of the baselines: a hub name (this one is carried by `yoro[demo]`) or a folder."""
    auth: bool = True
    key_rate_per_second: float = Field(0.0, ge=0)
    """Documents a second that each api process takes from one key, unless the key has a rate; 0: any."""
    mask_functions: dict[str, str] = Field(default_factory=dict)
    """What policies may mask with: name -> `module:function`, str to str; JSON in the environment."""
    writers: int = Field(2, ge=1, le=8)
    """Threads of an api process that commit; more overlap waits for a slow disk, in smaller groups."""
    api_core: int | None = Field(None, ge=0)
    """Core that an api process stays on with all its threads; unset: wherever the system puts them."""
    statement_seconds: float = Field(30.0, gt=0)
    """Longest statement of an api process; beyond it the request is answered 503."""
    threads: int = Field(0, ge=0)
    """Threads of one process's matrix products; 0: the library's choice."""
    scheduler_interval_seconds: float = Field(0.5, gt=0)
    trainer_interval_seconds: float = Field(0.5, gt=0)
    lease_seconds: float = Field(30.0, gt=0)
    rank_seconds: float = Field(600.0, gt=0)
    """How long the processes of a distributed trainer wait for each other before all of them end."""
    shard_base: bool = False
    """Split the base model over the processes of a distributed trainer (FSDP2)."""
    compile_base: bool = False
    """Run norms and MLPs of the base through torch.compile; not with a split base."""
    deaths_per_batch: int = Field(10, gt=0)
    """Claims of one batch that ended without a report before it counts as failing."""
    failures_per_batch: int = Field(3, gt=0)
    signing_key: Path | None = None
    """Ed25519 private key (PEM, PKCS #8) that signs manifests; `yoro adapters keygen` makes one."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's event files; needs `yoro[tensorboard]`."""
    mlflow_url: str = ""
    """MLflow tracking server that steps are reported to; needs `yoro[tracking]`."""
    wandb_project: str = ""
    """Weights & Biases project that steps are reported to; needs `yoro[tracking]`."""
    promotion_commands: dict[str, list[str]] = Field(default_factory=dict)
    """Commands that gated policies may name: name -> argument list; JSON in the environment."""
    hook_hosts: tuple[str, ...] = ()
    """Hosts that hooks may reach though their addresses are not public; JSON in the environment."""
    accel_redirect: str = ""
    """nginx: internal location of the store's folder; files are then sent by `X-Accel-Redirect`."""
    x_sendfile: bool = False
    """Apache and others: files are sent by the proxy, by `X-Sendfile`."""
    url: str = "http://127.0.0.1:8080"
    """Where clients of this machine find the API."""
    api_key: str = ""

    @cached_property
    def store_url(self) -> str:
        """Return the adapter store's URL, absolute where it is a folder."""
        return self.adapters_url or str((self.data / "adapters").resolve())

    @cached_property
    def limits(self) -> Limits:
        """Return the intake limits."""
        return Limits()

    @cached_property
    def kafka(self) -> KafkaSettings:
        """Return what Kafka is configured with."""
        return KafkaSettings()
