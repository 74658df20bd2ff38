"""A database with batches ready to train over a tiny model, and the checks of a whole chain."""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, text

from service.adapters.store import AdapterStore
from service.batches import history
from service.batches.history import Rewarded
from service.batches.scheduler import Scheduler
from service.database import policies
from service.database.engine import transaction
from service.ingest import grades, rollouts
from service.ingest.formats import native
from service.ingest.writer import Item, Writer
from service.policies import PolicySettings
from service.schemas import Grade, Trace

POLICY = "tiny"
BATCH = 4


class HashingEncoder:
    """Unit vectors from a text's hash: an encoder that needs no model."""

    name = "hashing"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = []
        for each in texts:
            seed = int.from_bytes(hashlib.sha256(each.encode()).digest()[:8])
            row = np.random.default_rng(seed).standard_normal(16)
            rows.append(row / np.linalg.norm(row))
        return np.array(rows, dtype=np.float32)


def tiny_settings(**changes: Any) -> PolicySettings:
    """Settings under which the tiny model moves visibly and no rollout is gated out."""
    return PolicySettings.model_validate(
        {
            "base_model": "./tiny",
            "base_revision": "sha256:test",
            "adapter": {"rank": 4},
            "optimizer": {"learning_rate": 1e-3},
            "objective": {"gate": "none", "expected_tokens": 4},
            "sequences": {"precision": "fp32", "max_tokens": 256, "token_budget": 512},
            "batching": {"size": BATCH, "max_ready_batches": 100, "max_staleness": 100},
            **changes,
        }
    )


def make_policy(engine: Engine, settings: PolicySettings, name: str = POLICY) -> int:
    """Create the policy; return its id."""
    with transaction(engine) as connection:
        return policies.create(connection, name, settings)


def add_rollouts(
    engine: Engine, policy_id: int, settings: PolicySettings, count: int, *, start: int = 0, version: int = 0
) -> None:
    """Write `count` traces of new tasks with rewards that differ, one transaction each."""
    for number in range(start, start + count):
        document = {
            "trace_id": f"t{number:04d}",
            "policy_version": version,
            "messages": [
                {"role": "user", "content": f"task {number}"},
                {"role": "assistant", "content": f"answer {number * 7919 % 101}"},
            ],
        }
        trace = native.validate(Trace, document)
        value = (number * 37 % 11) / 10
        graded = native.validate(Grade, {"trace_id": trace.trace_id, "grader": "g", "value": value})
        items: list[Item] = [
            rollouts.prepare(trace, b"{}", policy_id=policy_id, policy=POLICY, key=b"key"),
            grades.prepare(graded, policy_id=policy_id, rule=settings.reward),
        ]
        for outcome in Writer(engine).write(items):
            assert not isinstance(outcome, Exception), outcome


def form_batches(engine: Engine) -> int:
    """Let the scheduler form whatever is due; return how many batches."""
    scheduler = Scheduler(engine, HashingEncoder(), interval_seconds=1)
    formed = 0
    while found := scheduler.tick():
        formed += found
    return formed


def prepare_batches(engine: Engine, count: int, **changes: Any) -> int:
    """Make the policy with `count` ready batches; return its id."""
    settings = tiny_settings(**changes)
    policy_id = make_policy(engine, settings)
    add_rollouts(engine, policy_id, settings, count * BATCH)
    assert form_batches(engine) == count
    return policy_id


def rewarded(connection: Connection, policy_id: int) -> Rewarded:
    """Every rewarded rollout of the policy, as an estimator sees it."""
    ids = history.window(connection, policy_id, cutoff=datetime.now(UTC), members=[], limit=1000)
    return history.load(connection, ids, HashingEncoder.name)


def chain(engine: Engine) -> list[dict[str, Any]]:
    """Every version of every policy, oldest first."""
    with transaction(engine) as connection:
        rows = connection.execute(
            text("SELECT * FROM policy_versions ORDER BY policy_id, version")
        ).mappings()
        return [dict(row) for row in rows]


def check_each_trained_once(engine: Engine, rollouts: int) -> None:
    """Check that there are so many rollouts, each trained in one version."""
    with transaction(engine) as connection:
        states = connection.execute(text("SELECT state, count(*) FROM rollouts GROUP BY 1")).all()
        times = connection.execute(
            text("""SELECT count(*) FROM batch_members m JOIN policy_versions v ON v.batch_id = m.batch_id
                    WHERE m.live GROUP BY m.rollout_id""")
        ).scalars()
        assert [tuple(row) for row in states] == [("trained", rollouts)]
        assert list(times) == [1] * rollouts


def check_chain(engine: Engine, store: AdapterStore, batches: int, scratch: Path) -> str:
    """Check that the chain is whole and every rollout trained once; return the head adapter's sha256."""
    versions = chain(engine)
    assert [row["version"] for row in versions] == list(range(batches + 1))
    assert [row["parent"] for row in versions] == [None, *range(batches)]
    assert [row["depth"] for row in versions] == list(range(batches + 1))
    assert len({row["batch_id"] for row in versions[1:]}) == batches
    assert len({row["folder"] for row in versions[1:]}) == batches
    for row in versions[1:]:
        manifest = store.download(row["folder"], scratch / row["folder"], with_state=True)
        assert manifest == row["manifest"]
    check_each_trained_once(engine, batches * BATCH)
    with transaction(engine) as connection:
        lineage = connection.execute(text("SELECT head_version, next_version FROM lineages")).one()
        assert (lineage.head_version, lineage.next_version) == (batches, batches + 1)
    return str(versions[-1]["adapter_sha256"])
