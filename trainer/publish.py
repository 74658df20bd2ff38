"""A finished step to a published version: files, manifest, verification, probe.

Knows the store, no database: the worker commits what comes out of here. Invariants: a folder is never
written twice; the files are read back and verified before they count; nothing is ever deleted.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from service.adapters.signing import Signer
from service.adapters.store import AdapterStore, describe_file
from service.adapters.verify import WEIGHTS, Base, verify
from service.batches.claims import ClaimedBatch
from service.batches.leases import Lease
from service.batches.outcomes import Published
from service.errors import AdapterRejected
from service.policies import PolicySettings
from trainer import checkpoint, compiling
from trainer.optimizer import AdapterOptimizer
from trainer.policy import PolicyModel, sequence_logprobs
from trainer.scoring import adapter_of

SCHEMA_VERSION = 1
PROBE_TEXT = "The agent reads the task, thinks about what is asked, and answers in one word: yes."
PROBE_TOLERANCE = 1e-4
"""Greatest difference of a probe logprob between the trained model and its files loaded afresh."""


def publish(
    policy: PolicyModel,
    optimizer: AdapterOptimizer,
    store: AdapterStore,
    *,
    batch: ClaimedBatch,
    lease: Lease,
    metrics: Mapping[str, float],
    signer: Signer | None = None,
) -> Published:
    """Write and verify the files of the next version. Raises AdapterRejected when they do not hold."""
    folder = f"{batch.policy}/v{batch.head.next_version}-{lease.token}-{batch.attempt}"
    settings = batch.settings
    with tempfile.TemporaryDirectory(prefix="yoro-publish-") as scratch:
        written, read = Path(scratch, "written"), Path(scratch, "read")
        written.mkdir()
        names = checkpoint.save_adapter(policy, written, settings.base_model, settings.base_revision)
        state = [checkpoint.save_optimizer(optimizer, written)]
        probe = probe_logprobs(policy)
        manifest = _provenance(batch, lease) | {
            "files": [asdict(describe_file(written / name)) for name in names],
            "state": [asdict(describe_file(written / name)) for name in state],
            "probe": {"text": PROBE_TEXT, "logprobs": probe},
            "metrics": dict(metrics),
        }
        if signer is not None:
            manifest["signature"] = signer.sign(manifest)
        digest = store.write_version(folder, written, manifest)
        store.download(folder, read, with_state=True)
        verify(read, settings.adapter, base=Base(settings.base_model, settings.base_revision))
        check_probe(policy, read, probe)
    adapter = next(entry["sha256"] for entry in manifest["files"] if entry["name"] == WEIGHTS)
    return Published(folder, manifest, digest, adapter)


def probe_logprobs(policy: PolicyModel) -> list[float]:
    """Return the log-probabilities of the probe text under the adapter in place."""
    ids: list[int] = policy.tokenizer(PROBE_TEXT)["input_ids"]
    with compiling.eager(policy):
        return sequence_logprobs(policy, ids)


def check_probe(policy: PolicyModel, folder: Path, expected: list[float]) -> None:
    """Load the files afresh and compare their behaviour. Raises AdapterRejected (`probe`)."""
    with adapter_of(policy, folder):
        found = probe_logprobs(policy)
    compare_probe(found, expected)


def compare_probe(found: list[float], expected: list[float]) -> None:
    """Compare two probes token by token. Raises AdapterRejected (`probe`)."""
    distance = max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0)
    # `not <=` also refuses NaN
    if not distance <= PROBE_TOLERANCE:
        raise AdapterRejected(f"Probe logprobs from the files are off by up to {distance:.2e}", code="probe")


def check_base(manifest: Mapping[str, Any], settings: PolicySettings) -> None:
    """Refuse a version made on another base model than the policy's. Raises AdapterRejected."""
    wanted = {"name": settings.base_model, "revision": settings.base_revision}
    if manifest["base_model"] != wanted:
        raise AdapterRejected(
            f"The version is for {manifest['base_model']}, the policy's base is {wanted}", code="base_model"
        )


def _provenance(batch: ClaimedBatch, lease: Lease) -> dict[str, Any]:
    """Return what the manifest says of where the version comes from."""
    rewards = sorted((member.rollout_id, member.reward) for member in batch.members)
    settings = batch.settings
    return {
        "schema_version": SCHEMA_VERSION,
        "policy": batch.policy,
        "version": batch.head.next_version,
        "parent": batch.head.version,
        "depth": batch.head.depth + 1,
        "batch": batch.number,
        "fencing_token": lease.token,
        "attempt": batch.attempt,
        "created_at": datetime.now(UTC).isoformat(),
        "base_model": {"name": settings.base_model, "revision": settings.base_revision},
        "adapter": settings.adapter.model_dump(mode="json"),
        "rollouts": len(rewards),
        "rewards_sha256": hashlib.sha256(json.dumps(rewards).encode()).hexdigest(),
    }
