"""Why is nothing training? Status, alerts, stories, lists, steps and batches over HTTP."""

from typing import Any

import pytest
from sqlalchemy import Engine

from service.batches import alerts
from service.batches.outlook import outlook
from service.database.engine import transaction
from tests.conftest import Api
from tests.service.batches.ground import Ground, make_ground


def status(api: Api, ground: Ground) -> dict[str, Any]:
    answer = api.call("dashboard", "GET", f"/v1/policies/{ground.name}/status")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def alert_codes(ground: Ground) -> set[str]:
    with transaction(ground.engine) as connection:
        view = outlook(connection, ground.policy_id)
        return {alert.code for alert in alerts.find(connection, view)}


def test_status_counts_every_gate_and_says_in_words_what_is_missing(engine: Engine, api: Api) -> None:
    ground = make_ground(engine, reward={"require": ["expert"]}, batching={"size": 3})
    ground.trace("ungraded")
    ground.trace("unseen")
    ground.grade("unseen", 1.0, "a")
    ground.trace("failed", status="failed")
    ground.trace("unversioned", policy_version=None)
    ground.trace("good")
    ground.grade("good", 1.0, "expert")
    ground.grade("no-trace-yet", 1.0, "expert")
    ground.pass_time(60)
    document = status(api, ground)
    assert document["rollouts"] == {
        "waiting_reward": 2, "ready": 1, "batched": 0, "trained": 0, "excluded": 2,
    }  # fmt: skip
    assert document["reasons"] == {
        "waiting_reward": {"no_grade": 1, "missing:expert": 1},
        "excluded": {"failed_rollout": 1, "untrainable:no_version": 1},
    }
    assert document["grades_waiting_for_trace"] == 1
    assert document["next_batch"]["blocked_by"] == "needs 2 more rewarded tasks"
    assert 60 <= document["next_batch"]["oldest_ready_age_s"] < 120
    assert 60 <= document["oldest_waiting_reward_age_s"] < 120
    assert 60 <= document["oldest_grade_waiting_for_trace_age_s"] < 120
    assert document["trainer"]["state"] == "absent"
    assert {grader["grader"]: grader["grades"] for grader in document["graders"]} == {"a": 1, "expert": 2}


def test_a_trace_s_story_is_told_from_its_grades_to_the_version_it_trained(engine: Engine, api: Api) -> None:
    ground = make_ground(engine)
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number, comment="fine")
    ground.form()
    ground.train()
    ground.grade("t0", 1.0, "b")
    answer = api.call("reader", "GET", f"/v1/traces/t0?policy={ground.name}")
    story = answer.json()
    assert (story["state"], story["reason"], story["trained_version"]) == ("trained", "version 1", 1)
    assert story["reward"]["value"] == 0.0
    assert story["reward"]["rule"]["rule"] == "mean"
    assert [(grade["grader"], grade["counts"], grade["late"]) for grade in story["grades"]] == [
        ("a", True, False), ("b", False, True),
    ]  # fmt: skip
    (batch,) = story["batches"]
    assert (batch["reward"], batch["baseline"], batch["advantage"]) == (0.0, 1.0, -1.0)
    assert batch["neighbours"] == [{"trace_id": "t1", "weight": 1.0}]
    assert story["document"]["messages_total"] == 2
    paged = api.call("reader", "GET", f"/v1/traces/t0?policy={ground.name}&step=1&steps=1").json()
    assert [message["content"] for message in paged["document"]["messages"]] == ["done"]
    assert status(api, ground)["late_grades"] == 1


def test_a_story_needs_the_reader_s_role_and_an_erased_trace_is_gone(engine: Engine, api: Api) -> None:
    ground = make_ground(engine)
    ground.trace("t")
    path = f"/v1/traces/t?policy={ground.name}"
    assert api.call("dashboard", "GET", path).status_code == 403
    assert api.call("agent", "DELETE", path).status_code == 403
    assert api.call("reader", "GET", f"/v1/traces/unknown?policy={ground.name}").status_code == 404
    assert api.call("ops", "DELETE", path).json()["status"] == "erased"
    gone = api.call("reader", "GET", path)
    assert (gone.status_code, gone.json()["code"]) == (410, "erased")
    assert api.call("ops", "DELETE", path).status_code == 200
    again = api.post_trace(
        {"policy": ground.name, "trace_id": "t", "messages": [{"role": "user", "content": "x"}]}
    )
    assert (again.status_code, again.json()["code"]) == (410, "erased")
    assert status(api, ground)["reasons"]["excluded"] == {"erased": 1}


def test_lists_page_through_traces_of_a_state_newest_first(engine: Engine, api: Api) -> None:
    ground = make_ground(engine)
    for number in range(5):
        ground.trace(f"t{number}")
    ground.grade("t1", 1.0)
    path = f"/v1/traces?policy={ground.name}&limit=2"
    seen, cursor = [], ""
    while cursor is not None:
        page = api.call("reader", "GET", f"{path}&cursor={cursor}").json()
        seen += [trace["trace_id"] for trace in page["traces"]]
        cursor = page["next_cursor"]
    assert seen == ["t4", "t3", "t2", "t1", "t0"]
    ready = api.call("reader", "GET", f"{path}&state=ready").json()["traces"]
    assert [trace["trace_id"] for trace in ready] == ["t1"]
    assert api.call("reader", "GET", f"{path}&cursor=nonsense").status_code == 422


def test_lists_have_the_traces_that_status_counts_stale_ones_among_the_excluded(
    engine: Engine, api: Api
) -> None:
    ground = make_ground(engine, batching={"size": 2, "max_staleness": 0, "max_ready_batches": 1})
    for number in range(4):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number % 2)
    ground.trace("failed", status="failed")
    assert [ground.form(), ground.train()] == [1, 1]
    ground.trace("fresh", policy_version=1)
    ground.grade("fresh", 1.0)

    def listed(query: str) -> list[str]:
        seen: list[str] = []
        cursor = ""
        while cursor is not None:
            path = f"/v1/traces?policy={ground.name}&limit=2&{query}&cursor={cursor}"
            page = api.call("reader", "GET", path).json()
            seen += [trace["trace_id"] for trace in page["traces"]]
            cursor = page["next_cursor"]
        return seen

    counted = status(api, ground)
    assert listed("state=ready") == ["fresh"]
    assert listed("state=excluded") == ["failed", "t3", "t2"]
    assert listed("state=excluded&reason=stale") == ["t3", "t2"]
    assert listed("state=excluded&reason=failed_rollout") == ["failed"]
    assert listed("state=ready&reason=stale") == []
    assert listed("") == ["fresh", "failed", "t3", "t2", "t1", "t0"]
    for state, amount in counted["rollouts"].items():
        assert len(listed(f"state={state}")) == amount
    assert counted["reasons"]["excluded"] == {"stale": 2, "failed_rollout": 1}


def test_steps_and_batches_are_shown_with_their_members(engine: Engine, api: Api) -> None:
    ground = make_ground(engine)
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number)
    ground.form()
    ground.train()
    (step,) = api.call("dashboard", "GET", f"/v1/policies/{ground.name}/steps").json()["steps"]
    assert (step["batch"], step["outcome"], step["version"]) == (1, "trained", 1)
    batch = api.call("dashboard", "GET", f"/v1/policies/{ground.name}/batches/1").json()
    assert [(m["trace_id"], m["reward"], m["advantage"]) for m in batch["members"]] == [
        ("t0", 0.0, -1.0), ("t1", 1.0, 1.0),
    ]  # fmt: skip
    assert api.call("dashboard", "GET", f"/v1/policies/{ground.name}/batches/2").status_code == 404


def test_quarantine_over_http_is_listed_and_lifted(engine: Engine, api: Api) -> None:
    ground = make_ground(engine)
    ground.trace("t")
    ground.grade("t", 1.0, "rogue")
    document = {"policy": ground.name}
    assert api.call("grader", "POST", "/v1/graders/rogue/quarantine", json=document).status_code == 403
    assert api.call("ops", "POST", "/v1/graders/rogue/quarantine", json=document).status_code == 200
    assert status(api, ground)["rollouts"]["waiting_reward"] == 1
    listed = api.call("ops", "GET", f"/v1/graders/quarantines?policy={ground.name}").json()
    assert [each["grader"] for each in listed["quarantines"]] == ["rogue"]
    path = f"/v1/graders/rogue/quarantine?policy={ground.name}"
    assert api.call("ops", "DELETE", path).status_code == 200
    assert api.call("ops", "DELETE", path).status_code == 404
    assert status(api, ground)["rollouts"]["ready"] == 1


def test_a_batch_that_waits_without_a_trainer_raises_an_alert_once_and_clears_it(engine: Engine) -> None:
    ground = make_ground(engine)
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number)
    ground.form()
    assert alert_codes(ground) == set()
    ground.pass_time(120)
    assert alert_codes(ground) == {"trainer_absent"}
    for _ in range(2):
        ground.fresh_scheduler()._tidy(ground.policy_id)
    assert ground.rows("SELECT code, cleared_at FROM alerts WHERE policy_id = :policy") == [
        ("trainer_absent", None)
    ]
    ground.train()
    ground.fresh_scheduler()._tidy(ground.policy_id)
    ((cleared,),) = ground.rows("SELECT cleared_at IS NOT NULL FROM alerts WHERE policy_id = :policy")
    assert cleared


def test_samplers_that_stay_on_an_old_version_are_noticed(engine: Engine) -> None:
    ground = make_ground(engine)
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number)
    ground.form()
    ground.train()
    ground.pass_time(3600)
    for number in range(10, 10 + alerts.NEWEST_TRACES):
        ground.trace(f"t{number}")
    assert "sampler_version_stuck" in alert_codes(ground)
    ground.trace("new", policy_version=1)
    assert "sampler_version_stuck" not in alert_codes(ground)


def test_batches_that_never_have_a_signal_and_silent_graders_are_noticed(engine: Engine) -> None:
    ground = make_ground(engine, reward={"require": ["a"]})
    for number in range(6):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", 0.5)
    for _ in range(3):
        ground.form()
    assert alert_codes(ground) == {"no_signal_batches"}
    ground.pass_time(7200)
    ground.trace("t9")
    assert alert_codes(ground) == {"no_signal_batches", "grader_silent"}


@pytest.mark.parametrize(("grader", "expected"), [("b", {"grader_silent"}), (alerts.SPEAKS_ONCE, set())])
def test_a_regular_grader_is_missed_and_an_imported_calibration_set_is_not(
    engine: Engine, grader: str, expected: set[str]
) -> None:
    ground = make_ground(engine)
    for number in range(alerts.KNOWN_GRADER):
        ground.trace(f"t{number}", messages=[{"role": "user", "content": "hello"}])
        ground.grade(f"t{number}", 0.5, grader)
    ground.pass_time(7200)
    ground.trace("new")
    assert alert_codes(ground) == expected
