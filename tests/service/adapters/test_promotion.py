"""Gated promotion: gates and hook decide, the verdict is recorded, and races move no pointer wrongly."""

import json
import sys
import threading
from typing import Any

import pytest
from sqlalchemy import Engine, text

from service.adapters import pointers, promotion
from service.adapters.promotion import Promoter, Verdict
from service.batches.rewind import rewind
from service.database import policies
from service.database.engine import transaction
from service.settings import Settings
from tests.service.adapters.lineage import Lineage

YES = [sys.executable, "-c", 'print(\'{"pass": true, "metrics": {"exact": 0.4}}\')']
NO = [sys.executable, "-c", 'print(\'{"pass": false, "reason": "worse"}\')']


@pytest.fixture
def promoter(engine: Engine, settings: Settings) -> Promoter:
    return Promoter(engine, settings.model_copy(update={"promotion_commands": {"yes": YES, "no": NO}}))


def gate(lineage: Lineage, **changes: Any) -> None:
    with transaction(lineage.engine) as connection:
        policies.revise(connection, lineage.id, {"promotion": {"mode": "gated", **changes}})


def verdicts(lineage: Lineage) -> list[dict[str, Any]]:
    with transaction(lineage.engine) as connection:
        return promotion.verdicts(connection, lineage.id, limit=10)


def test_a_version_that_passes_is_promoted_and_its_verdict_recorded(
    lineage: Lineage, promoter: Promoter
) -> None:
    gate(lineage, hook_command="yes", max_kl=1.0, min_net_reward=-1.0)
    lineage.step()
    assert lineage.row().promoted_version == 0
    assert promoter.tick()
    assert lineage.row().promoted_version == 1
    (verdict,) = verdicts(lineage)
    assert (verdict["version"], verdict["passed"], verdict["reason"]) == (1, True, "")
    assert verdict["metrics"]["hook/exact"] == 0.4
    assert {"kl_ref", "net_reward"} <= verdict["metrics"].keys()
    assert not promoter.tick()  # a verdict is final


@pytest.mark.parametrize(
    ("gates", "reason"),
    [
        ({"hook_command": "no"}, "worse"),
        ({"hook_command": "unknown"}, "no promotion command"),
        ({"max_kl": 0.001}, "kl_ref"),
        ({"min_net_reward": 0.99}, "net_reward"),
        ({"hook_url": "http://localhost:1/"}, "not a public address"),
    ],
)
def test_a_version_that_fails_is_not_promoted_and_the_record_says_why(
    gates: dict[str, Any], reason: str, lineage: Lineage, promoter: Promoter
) -> None:
    gate(lineage, **gates)
    lineage.step()
    assert promoter.tick()
    (verdict,) = verdicts(lineage)
    assert (lineage.row().promoted_version, verdict["passed"]) == (0, False)
    assert reason in verdict["reason"]


def test_a_tainted_version_does_not_pass_and_is_not_even_shown_to_the_hook(
    lineage: Lineage, promoter: Promoter
) -> None:
    gate(lineage, hook_command="yes")
    lineage.step()
    with transaction(lineage.engine) as connection:
        connection.execute(text("UPDATE policy_versions SET tainted = '{erased}' WHERE version = 1"))
    promoter.tick()
    (verdict,) = verdicts(lineage)
    assert (verdict["passed"], verdict["metrics"].get("hook/exact")) == (False, None)


def claim(lineage: Lineage) -> Any:
    with transaction(lineage.engine) as connection:
        return connection.execute(promotion._CLAIM, {"most": 5}).one_or_none()


def conclude(lineage: Lineage, version: int) -> bool:
    with transaction(lineage.engine) as connection:
        return promotion.conclude(connection, lineage.id, version, 1, Verdict())


def test_a_verdict_that_comes_after_a_rollback_or_a_rewind_moves_nothing(lineage: Lineage) -> None:
    gate(lineage)
    lineage.step(), lineage.step()
    claim(lineage)
    with transaction(lineage.engine) as connection:
        rewind(connection, lineage.id, 1, reason="test")
    assert not conclude(lineage, 2)
    with transaction(lineage.engine) as connection:
        pointers.promote(connection, lineage.id, 1, reason="test")
    lineage.step(1)
    assert claim(lineage).version == 3
    with transaction(lineage.engine) as connection:
        pointers.roll_back(connection, lineage.id, 0, reason="test")
    assert not conclude(lineage, 3)
    assert lineage.row().promoted_version == 0


def test_a_version_is_judged_by_one_at_a_time_and_again_after_its_judge_died(lineage: Lineage) -> None:
    gate(lineage)
    lineage.step()
    start, claims = threading.Barrier(4), []

    def race() -> None:
        start.wait()
        claims.append(claim(lineage))

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each is not None for each in claims) == 1
    assert claim(lineage) is None
    with transaction(lineage.engine) as connection:
        connection.execute(text("UPDATE promotion_checks SET started_at = now() - interval '1 day'"))
    assert claim(lineage).attempts == 2
    assert not conclude(lineage, 1)  # the first judge comes back to life: its verdict counts no more


def test_a_settings_document_cannot_name_a_command_line(lineage: Lineage) -> None:
    with pytest.raises(ValueError, match="hook_command"):
        gate(lineage, hook_command="rm -rf /")
    assert json.loads(lineage.settings.model_dump_json())["promotion"]["mode"] == "auto"
