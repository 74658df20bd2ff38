"""Calibration sets out of the database and back: which rollouts count, and that features survive."""

from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, text

from service.baselines.calibration_sets import parsed_lines
from service.batches import calibration_export, erasure, history, vectors
from service.batches.calibration_export import Wanted
from service.database import policies
from service.database.engine import transaction
from service.errors import NotFound
from service.ingest import grades, masking, rollouts
from service.ingest.formats import jsontext, native
from service.ingest.writer import Item, Writer
from service.schemas import Grade, Trace
from tests.conftest import MakePolicy, Policy
from tests.training_ground import HashingEncoder

TOOL = {"type": "function", "function": {"name": "refund", "description": "Pay back."}}


def attempt(
    engine: Engine, policy: Policy, trace_id: str, task: str, value: float | None, **fields: Any
) -> None:
    """One rollout of a task, graded unless the value is None."""
    document = {
        "trace_id": trace_id, "task_id": task, "policy_version": 0, "context": {"tier": 2, "who": "acme"},
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Refund\\u2028{task}"},
            {"role": "assistant", "content": "done"},
        ],
        "tools": [TOOL], "metadata": {"attempt": trace_id}, **fields,
    }  # fmt: skip
    trace = native.validate(Trace, document)
    settings = policy.settings
    items: list[Item] = [
        rollouts.prepare(
            trace,
            jsontext.dump(document),
            policy_id=policy.id,
            policy=policy.name,
            key=b"key",
            settings=settings,
            mask=masking.compiled(settings.masking, {}),
        )
    ]
    if value is not None:
        graded = native.validate(Grade, {"trace_id": trace_id, "grader": "g", "value": value})
        items.append(grades.prepare(graded, policy_id=policy.id, rule=settings.reward))
    for outcome in Writer(engine).write(items):
        assert not isinstance(outcome, Exception), outcome


def exported(engine: Engine, **wanted: Any) -> dict[str, list[float]]:
    """Rewards by task id."""
    with transaction(engine) as connection:
        lines = [found.line for found in calibration_export.export(connection, Wanted("support", **wanted))]
    return {task_id: rewards.tolist() for task_id, _, rewards in parsed_lines(lines)}


def test_a_line_reads_back_as_the_features_that_the_baselines_saw(
    engine: Engine, make_policy: MakePolicy
) -> None:
    policy = make_policy()
    attempt(engine, policy, "a", "t", 1)
    attempt(engine, policy, "b", "t", 0)
    with transaction(engine) as connection:
        (found,) = calibration_export.export(connection, Wanted("support"))
        ids = list(connection.execute(text("SELECT id FROM rollouts ORDER BY id")).scalars())
        missing = history.missing_texts(connection, ids, HashingEncoder.name)
        encoded = {each: np.ones(2, dtype="<f4").tobytes() for each in missing}
        vectors.remember(connection, HashingEncoder.name, missing, encoded)
        seen = history.load(connection, ids, HashingEncoder.name).scored.tasks[0]
    ((task_id, features, rewards),) = parsed_lines([found.line])
    assert (task_id, rewards.tolist()) == ("t", [1, 0])
    assert features == seen.features
    assert "refund: Pay back." in features.text
    assert "done" not in found.line


def test_what_is_no_second_attempt_is_left_out(engine: Engine, make_policy: MakePolicy) -> None:
    policy = make_policy()
    attempt(engine, policy, "a", "kept", 1)
    attempt(engine, policy, "b", "kept", 0.5)
    attempt(engine, policy, "c", "kept", None)
    attempt(engine, policy, "d", "once", 1)
    for trace_id in ("e", "f"):
        attempt(engine, policy, trace_id, "delivered_twice", 1, metadata={})
    for trace_id in ("g", "h"):
        attempt(engine, policy, trace_id, "erased", 1)
    assert set(exported(engine)) == {"kept", "erased"}
    with transaction(engine) as connection:
        erasure.erase(connection, policy.id, "g")
    assert exported(engine) == {"kept": [1, 0.5]}
    assert exported(engine, least=3) == {}


def test_a_window_of_versions_and_no_other_policy(engine: Engine, make_policy: MakePolicy) -> None:
    policy, other = make_policy(), make_policy("other")
    with transaction(engine) as connection:
        connection.execute(
            text("""INSERT INTO policy_versions (policy_id, version, parent, depth, fencing_token, folder)
                    SELECT p.id, v, v - 1, v, 1, p.name || v FROM policies p, generate_series(1, 9) AS v""")
        )
    for number, version in enumerate((3, 4, 4, 9, None)):
        attempt(engine, policy, f"a{number}", "t", number / 10, policy_version=version)
        attempt(engine, other, f"a{number}", "t", 1, policy_version=version)
    assert exported(engine) == {"t": [0, 0.1, 0.2, 0.3, 0.4]}
    assert exported(engine, oldest=4) == {"t": [0.1, 0.2, 0.3]}
    assert exported(engine, oldest=4, newest=8) == {"t": [0.1, 0.2]}
    with transaction(engine) as connection:
        (found,) = calibration_export.export(connection, Wanted("support"))
        assert (found.rewards, found.oldest, found.newest) == (5, 3, 9)
        with pytest.raises(NotFound, match="'nobody'"):
            list(calibration_export.export(connection, Wanted("nobody")))


def test_a_reward_of_an_earlier_rule_does_not_count(engine: Engine, make_policy: MakePolicy) -> None:
    policy = make_policy()
    for trace_id, state in (("a", "trained"), ("b", "trained"), ("c", "ready")):
        attempt(engine, policy, trace_id, "t", 1)
        with transaction(engine) as connection:
            connection.execute(
                text("UPDATE rollouts SET state = :state WHERE trace_id = :id"),
                {"state": state, "id": trace_id},
            )
    with transaction(engine) as connection:
        policies.revise(connection, policy.id, {"batching": {"size": 8}})
    assert exported(engine) == {"t": [1, 1, 1]}
    with transaction(engine) as connection:
        policies.revise(connection, policy.id, {"reward": {"rule": "min"}})
        assert calibration_export.outdated(connection, Wanted("support")) == 3
    assert exported(engine) == {}


def test_masked_words_stay_masked(engine: Engine, make_policy: MakePolicy) -> None:
    policy = make_policy(masking={"patterns": [{"pattern": "acme"}]})
    for trace_id in ("a", "b"):
        attempt(engine, policy, trace_id, "t", 1)
    with transaction(engine) as connection:
        (found,) = calibration_export.export(connection, Wanted("support"))
    assert "acme" not in found.line
    assert "[masked]" in found.line
