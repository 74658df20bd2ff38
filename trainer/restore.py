"""The head's weights and optimizer state in memory, loaded from the store when they are not those.

Invariants: what is in memory is trusted only under the token that loaded it and for the version it is;
a restored head reproduces the probe that its manifest recorded, or is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from service import telemetry
from service.adapters.store import AdapterStore
from service.batches.claims import ClaimedBatch
from service.batches.leases import Lease
from service.errors import AdapterRejected, Unavailable
from service.policies import PolicySettings, locate_base_model
from service.settings import Settings
from trainer import checkpoint, compiling, publish
from trainer.optimizer import AdapterOptimizer
from trainer.policy import PolicyModel, load_policy

Prepare = Callable[[PolicyModel, PolicySettings], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A policy ready to train, with the settings that it was loaded by."""

    policy: PolicyModel
    optimizer: AdapterOptimizer
    settings: PolicySettings


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is in memory is version `version` of the lineage under `token`."""

    policy_id: int
    token: int
    version: int
    loaded: Loaded


class Restorer:
    """Keeps one base model and one head; loads what a batch needs."""

    def __init__(self, store: AdapterStore, settings: Settings, prepare: Prepare | None = None) -> None:
        """Nothing is loaded yet; `prepare` is called with each base model that is loaded, onto the CPU."""
        self._store, self._settings, self._prepare = store, settings, prepare
        self._kept: _Kept | None = None
        self._model: tuple[object, PolicyModel] | None = None

    def restore(self, lease: Lease, batch: ClaimedBatch) -> Loaded:
        """Return the batch's head, from memory if it is certainly that. Raises AdapterRejected, NotFound."""
        kept = self._kept
        if kept is not None and kept.loaded.settings == batch.settings and self._is_head(kept, lease, batch):
            return kept.loaded
        self._kept = None
        policy = self.base(batch.settings)
        loaded = Loaded(
            policy, AdapterOptimizer(policy.parameters(), batch.settings.optimizer), batch.settings
        )
        self._load_head(loaded, batch)
        self.keep(lease, batch.head.version, loaded)
        return loaded

    def keep(self, lease: Lease, version: int, loaded: Loaded) -> None:
        """Say that memory now holds this version, committed under this lease."""
        self._kept = _Kept(lease.policy_id, lease.token, version, loaded)

    def forget(self) -> None:
        """Stop trusting what is in memory; the base model stays."""
        self._kept = None

    def _is_head(self, kept: _Kept, lease: Lease, batch: ClaimedBatch) -> bool:
        held = (kept.policy_id, kept.token, kept.version)
        return held == (lease.policy_id, lease.token, batch.head.version)

    def base(self, settings: PolicySettings) -> PolicyModel:
        """Return the base model with some adapter on it, loaded once. Raises Unavailable."""
        wanted = (settings.base_model, settings.base_revision, settings.adapter, settings.sequences.precision)
        if self._model is None or self._model[0] != wanted:
            self._model = None  # two bases need not fit into memory
            if self._prepare is not None and settings.adapter.base_quantization != "none":
                raise Unavailable("A base in four bits cannot be split over processes: unset YORO_SHARD_BASE")
            source = locate_base_model(settings.base_model, settings.base_revision, self._settings.model_root)
            telemetry.logger().info("loading_base_model", name=source.name, revision=source.revision)
            policy = load_policy(
                source, settings,
                device="cpu" if self._prepare else None, trust_remote_code=self._settings.trust_remote_code,
            )  # fmt: skip
            if self._prepare is not None:
                self._prepare(policy, settings)
            elif self._settings.compile_base:
                compiling.compile_decoder(policy)
            self._model = (wanted, policy)
        return self._model[1]

    def _load_head(self, loaded: Loaded, batch: ClaimedBatch) -> None:
        folder = batch.folders.get(batch.head.version)
        if batch.head.version == 0:
            checkpoint.reset_to_base(loaded.policy)
            return
        if folder is None:
            raise AdapterRejected(f"Version {batch.head.version} has no files", code="version_gone")
        with TemporaryDirectory(prefix="yoro-head-") as scratch:
            manifest = self._store.download(
                folder, Path(scratch), with_state=True,
                manifest_sha256=batch.manifests.get(batch.head.version),
            )  # fmt: skip
            publish.check_base(manifest, batch.settings)
            checkpoint.load_adapter(loaded.policy, Path(scratch))
            checkpoint.load_optimizer(loaded.optimizer, Path(scratch))
        publish.compare_probe(publish.probe_logprobs(loaded.policy), manifest["probe"]["logprobs"])
