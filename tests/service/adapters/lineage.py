"""A policy whose versions are made by the real lease, batch and commit, with files but without torch."""

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sqlalchemy import Engine, text

from service.adapters.store import AdapterStore, describe_file
from service.batches import claims, leases, outcomes
from service.batches.leases import Lease
from service.batches.outcomes import Judgement, Published, Record, Step
from service.database.engine import transaction
from service.policies import PolicySettings
from tests import training_ground
from tests.training_ground import BATCH

NAME = training_ground.POLICY
A, B = "base_model.model.layers.0.q_proj.lora_A.weight", "base_model.model.layers.0.q_proj.lora_B.weight"


@dataclass
class Lineage:
    """One policy in a database, and its store."""

    engine: Engine
    store: AdapterStore
    scratch: Path
    settings: PolicySettings
    id: int
    width: int = 64
    _tasks: Any = field(default_factory=itertools.count)

    def add_rollouts(self, count: int, version: int = 0) -> list[str]:
        """Post graded traces of new tasks, sampled from a version; return their ids."""
        starts = [next(self._tasks) for _ in range(count)]
        training_ground.add_rollouts(
            self.engine, self.id, self.settings, count, start=starts[0], version=version
        )
        return [f"t{start:04d}" for start in starts]

    def form_batch(self, version: int = 0) -> None:
        """Post a batch's worth of rollouts and let the scheduler form it."""
        self.add_rollouts(BATCH, version)
        assert training_ground.form_batches(self.engine) == 1

    def claim(self) -> tuple[Lease, claims.ClaimedBatch]:
        """Take lease and batch as a trainer does."""
        lease = leases.claim(self.engine, self.id, "trainer", 30.0)
        assert lease is not None
        batch = claims.claim_batch(self.engine, lease)
        assert batch is not None
        return lease, batch

    def commit(self, lease: Lease, batch: claims.ClaimedBatch) -> int:
        """Write files and commit the step; return the version."""
        version = batch.head.next_version
        published = self.write(
            version, f"{NAME}/v{version}-{lease.token}-{batch.attempt}", batch.head.version
        )
        judged = {member.rollout_id: Judgement("text") for member in batch.members}
        record = Record(judged, policy_tokens=BATCH, metrics={"kl_ref": 0.01 * version})
        outcomes.commit_step(
            self.engine, lease, Step(batch.id, batch.head.version, version, published, record)
        )
        return version

    def step(self, version: int = 0) -> int:
        """Make the next version of a batch of rollouts that `version` sampled."""
        self.form_batch(version)
        return self.commit(*self.claim())

    def write(self, version: int, folder: str, parent: int) -> Published:
        """Write the files of a version into the store."""
        source = self.scratch / folder
        source.mkdir(parents=True)
        weights = np.full((4, self.width), version, dtype=np.float32)
        save_file({A: weights, B: weights.T.copy()}, source / "adapter_model.safetensors")
        (source / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "v": version}))
        files = [asdict(describe_file(path)) for path in sorted(source.iterdir())]
        manifest = {
            "schema_version": 1, "policy": NAME, "version": version, "parent": parent, "files": files,
            "state": [], "metrics": {"kl_ref": 0.01 * version},
            "probe": {"text": "probe", "logprobs": [-0.1 * version, -0.2]},
        }  # fmt: skip
        digest = self.store.write_version(folder, source, manifest)
        sha256 = next(file["sha256"] for file in files if file["name"].endswith("safetensors"))
        return Published(folder, manifest, digest, sha256)

    def row(self) -> Any:
        """Return the lineage's row."""
        with transaction(self.engine) as connection:
            return connection.execute(
                text("SELECT * FROM lineages WHERE policy_id = :p"), {"p": self.id}
            ).one()

    def versions(self) -> dict[int, Any]:
        """Return the rows of all versions."""
        with transaction(self.engine) as connection:
            rows = connection.execute(
                text("SELECT * FROM policy_versions WHERE policy_id = :p ORDER BY version"), {"p": self.id}
            )
            return {row.version: row for row in rows}

    def states(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of each trace."""
        with transaction(self.engine) as connection:
            rows = connection.execute(text("SELECT trace_id, state, reason FROM rollouts ORDER BY id"))
            return {row.trace_id: (row.state, row.reason) for row in rows}


def make_lineage(engine: Engine, store: AdapterStore, scratch: Path, **changes: Any) -> Lineage:
    """Create the policy."""
    settings = training_ground.tiny_settings(**changes)
    return Lineage(engine, store, scratch, settings, training_ground.make_policy(engine, settings))


def folder_of(store: AdapterStore) -> Path:
    """Return the folder that the store is; a test that looks into it is skipped over a bucket."""
    if store.local_root is None:
        pytest.skip("looks into the store's folder")
    return store.local_root
