"""`yoro calibration-set`: tasks out of a real database, and into one as history that batches start from."""

import inspect
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, text

from service.baselines.calibration_sets import parsed_lines
from service.batches import alerts, history, vectors
from service.database.engine import transaction
from tests import training_ground
from tests.training_ground import HashingEncoder
from tests.yoro.commands import run
from yoro.cli import calibration_sets
from yoro.client import Client

LINES = [
    {"task_id": "a", "prompt": "add 1", "system": "Be brief.", "rewards": [1, 0.75, None],
     "tools": [{"type": "function", "function": {"name": "sum", "description": "Add."}}]},
    {"task_id": "b", "prompt": "write a poem", "context": {"tier": 2}, "rewards": [0.25]},
    {"task_id": "c", "prompt": "nobody tried", "rewards": []},
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three tasks with three rewards."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def remember_texts(engine: Engine, encoder: HashingEncoder) -> None:
    """Put every text's vector into the cache, as the scheduler does."""
    with transaction(engine) as connection:
        ids = list(connection.execute(text("SELECT id FROM rollouts")).scalars())
        missing = history.missing_texts(connection, ids, encoder.name)
        rows = encoder.encode([each.text for each in missing.values()]).astype("<f4")
        encoded = {digest: row.tobytes() for digest, row in zip(missing, rows, strict=True)}
        vectors.remember(connection, encoder.name, missing, encoded)


def test_an_export_is_what_calibrate_reads(
    engine: Engine, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YORO_DATABASE_URL", database_url)
    file = tmp_path / "tasks.jsonl"
    training_ground.prepare_batches(engine, 1)
    none = run("calibration-set", "export", "tiny", str(file))
    assert none.exit_code == 2
    assert "no task of tiny has 2 rewards" in none.stderr
    assert not list(tmp_path.iterdir())
    with transaction(engine) as connection:
        connection.exec_driver_sql("UPDATE rollouts SET task_key = 'id:' || mod(id, 2)")
    done = run("calibration-set", "export", "tiny", str(file))
    assert done.stdout == f"2 tasks with 4 rewards of versions 0 to 0: {file}\n"
    assert list(tmp_path.iterdir()) == [file]
    assert "make no batch of 32" in run("calibrate", str(file)).stderr
    assert run("calibration-set", "export", "nobody", str(file)).exit_code == 1


@pytest.mark.usefixtures("served")
def test_an_import_is_history_with_the_features_of_its_lines(engine: Engine, file: Path) -> None:
    policy = training_ground.make_policy(engine, training_ground.tiny_settings())
    done = run("calibration-set", "import", "tiny", str(file), "--policy-version", "0")
    assert (done.exit_code, done.stdout) == (0, "3 rewards of 3 tasks are stored as history of tiny\n"), (
        done.output
    )
    remember_texts(engine, HashingEncoder())
    with transaction(engine) as connection:
        found = training_ground.rewarded(connection, policy).scored
        states = connection.execute(text("SELECT DISTINCT state, reason FROM rollouts")).all()
    assert [tuple(row) for row in states] == [("excluded", "untrainable:no_assistant_turn")]
    # the last round of attempts is the newest history, and holds every task
    assert found.rewards[0] == 0.75
    expected = {task_id: features for task_id, features, _ in parsed_lines(map(json.dumps, LINES))}
    assert [task.features for task in found.tasks if task.task_key == "id:a"] == [expected["a"]] * 2
    assert [task.features for task in found.tasks if task.task_key == "id:b"] == [expected["b"]]
    assert sorted(found.rewards) == [0.25, 0.75, 1.0]


@pytest.mark.usefixtures("served")
def test_an_import_can_be_repeated_and_comes_out_of_an_export(
    engine: Engine, file: Path, tmp_path: Path
) -> None:
    training_ground.make_policy(engine, training_ground.tiny_settings(reward={"value_range": (-1, 3)}))
    for _ in range(2):
        assert run("calibration-set", "import", "tiny", str(file)).exit_code == 0
    back = tmp_path / "back.jsonl"
    assert run("calibration-set", "export", "tiny", str(back)).exit_code == 0
    (task,) = [json.loads(line) for line in back.read_text().splitlines()]
    assert (task.pop("task_id"), sorted(task.pop("rewards"))) == ("a", [0.75, 1.0])
    assert task == {name: value for name, value in LINES[0].items() if name in task}


@pytest.mark.usefixtures("served")
def test_a_task_known_by_its_features_keeps_its_key(engine: Engine, tmp_path: Path) -> None:
    policy = training_ground.make_policy(engine, training_ground.tiny_settings())
    training_ground.add_rollouts(engine, policy, training_ground.tiny_settings(), 1)
    with transaction(engine) as connection:
        key: str = connection.execute(text("SELECT task_key FROM rollouts")).scalar_one()
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"task_id": key, "prompt": "task 0", "rewards": [1]}))
    assert run("calibration-set", "import", "tiny", str(file)).exit_code == 0
    with transaction(engine) as connection:
        assert connection.execute(text("SELECT DISTINCT task_key FROM rollouts")).scalars().all() == [key]


@pytest.mark.usefixtures("served")
def test_the_first_batch_after_an_import_is_judged_by_it(engine: Engine, tmp_path: Path) -> None:
    """Every task of the first batch is one of the file's: its baseline is what the file says of it."""
    settings = training_ground.tiny_settings()
    policy = training_ground.make_policy(engine, settings)
    rng = np.random.default_rng(0)
    known = {f"task {number}": float(rng.random()) for number in range(training_ground.BATCH)}
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        "".join(json.dumps({"task_id": t, "prompt": t, "rewards": [v] * 20}) + "\n" for t, v in known.items())
    )
    assert run("calibration-set", "import", "tiny", str(file), "--policy-version", "0").exit_code == 0
    training_ground.add_rollouts(engine, policy, settings, training_ground.BATCH)
    assert training_ground.form_batches(engine) == 1
    with transaction(engine) as connection:
        rows = connection.execute(
            text("SELECT r.trace_id, m.baseline FROM batch_members m JOIN rollouts r ON r.id = m.rollout_id")
        ).all()
    assert {row.trace_id for row in rows} == {f"t{number:04d}" for number in range(training_ground.BATCH)}
    for row in rows:
        assert row.baseline == pytest.approx(known[f"task {int(row.trace_id[1:])}"], abs=0.15)


@pytest.mark.parametrize(
    ("rule", "graders", "said"),
    [
        ({"require": ["expert"]}, (), "the policy's rule requires expert"),
        ({"rule": "weighted", "weights": {"expert": 1, "crm": 0}}, (), "rule weighs expert alone"),
        ({"require": ["expert", "crm"]}, ("expert", "crm"), ""),
        ({"rule": "weighted", "weights": {"expert": 1}}, ("expert",), ""),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("served")
def test_an_import_that_would_make_no_reward_is_refused(
    engine: Engine, file: Path, rule: dict[str, object], graders: tuple[str, ...], said: str
) -> None:
    training_ground.make_policy(engine, training_ground.tiny_settings(reward=rule))
    options = [part for name in graders for part in ("--grader", name)]
    done = run("calibration-set", "import", "tiny", str(file), *options)
    with transaction(engine) as connection:
        rewards = sorted(connection.execute(text("SELECT reward FROM rollouts")).scalars())
    if said:
        assert (done.exit_code, rewards) == (2, [])
        assert said in " ".join(done.stderr.replace("│", " ").split())
    else:
        assert (done.exit_code, rewards) == (0, [0.25, 0.75, 1.0])


@pytest.mark.usefixtures("served")
def test_a_task_that_changed_under_its_id_is_told(engine: Engine, file: Path) -> None:
    training_ground.make_policy(engine, training_ground.tiny_settings())
    assert run("calibration-set", "import", "tiny", str(file)).exit_code == 0
    file.write_text(json.dumps({"task_id": "b", "prompt": "another", "rewards": [1]}))
    done = run("calibration-set", "import", "tiny", str(file))
    assert done.exit_code == 1
    assert "refused: task 'b': Trace calibration-" in done.stderr
    assert "is already there with other content" in done.stderr
    assert "1 of 1 rewards were refused" in done.stderr


@pytest.mark.usefixtures("served")
def test_the_newest_file_counts_also_where_it_says_what_was_said_before(engine: Engine, file: Path) -> None:
    training_ground.make_policy(engine, training_ground.tiny_settings())
    for moment, reward in ((1_000, 0.2), (2_000, 0.8), (3_000, 0.2), (3_000, 0.2)):
        file.write_text(json.dumps({"task_id": "a", "prompt": "p", "rewards": [reward]}))
        os.utime(file, (moment, moment))
        assert run("calibration-set", "import", "tiny", str(file)).exit_code == 0
        with transaction(engine) as connection:
            assert connection.execute(text("SELECT reward FROM rollouts")).scalar_one() == reward
    with transaction(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM grades")).scalar_one() == 3


@pytest.mark.usefixtures("served")
def test_a_version_that_is_not_there_is_told(engine: Engine, file: Path) -> None:
    training_ground.make_policy(engine, training_ground.tiny_settings())
    done = run("calibration-set", "import", "tiny", str(file), "--policy-version", "77")
    assert done.exit_code == 1
    assert "refused: task 'a': there is no version 77" in done.stderr


@pytest.mark.usefixtures("served")
def test_a_file_beyond_the_window_is_told(engine: Engine, file: Path) -> None:
    settings = training_ground.tiny_settings(baseline={"window_batches": 0})
    training_ground.make_policy(engine, settings)
    done = run("calibration-set", "import", "tiny", str(file))
    assert done.stdout.endswith("are stored as history of tiny; a batch sees the newest 0\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"task_id": "d", "prompt": "p", "rewards": ["good"]}', "line 4: `rewards` holds 'good'"),
        ('{"task_id": "b", "prompt": "p", "rewards": [1]}', "line 4: `task_id` 'b' is on line 2 already"),
        ('{"task_id": "d", "prompt": "p", "rewards": [1], "context": {"x": NaN}}', "line 4: not JSON"),
        ('{"task_id": "d", "prompt": "p", "rewards": [1], "context": {"x": 1e999}}', "line 4: not JSON"),
        ('{"task_id": "d", "prompt": "\\ud800", "rewards": [1]}', "line 4: not JSON"),
        ('{"task_id": "d", "prompt": "p", "rewards": [1], "tools": ["x"]}', "line 4: `tools` must be a list"),
        ('{"task_id": "d", "prompt": ' + "[" * 99_999, "line 4: not JSON"),
    ],
)
def test_a_malformed_line_is_named_before_anything_is_sent(file: Path, line: str, said: str) -> None:
    file.write_text(file.read_text() + line)
    done = run("calibration-set", "import", "tiny", str(file), "--url", "http://127.0.0.1:1")
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.usefixtures("served")
def test_prompts_of_several_messages_come_back_as_the_same_tasks(engine: Engine, tmp_path: Path) -> None:
    """Without ids tasks are known by their features: export and import must agree on them."""
    policy = training_ground.make_policy(engine, training_ground.tiny_settings())
    said = [("system", "A."), ("developer", "B."), ("user", "C."), ("tool", "D.")]
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in said]
    messages.append({"role": "user", "content": [{"type": "text", "text": "E."}]})
    with Client(os.environ["YORO_URL"], os.environ["YORO_API_KEY"]) as client:
        for attempt in (0, 1):
            client.post_trace(
                {"policy": "tiny", "trace_id": f"t{attempt}", "messages": messages,
                 "metadata": {"n": attempt}, "reward": {"grader": "g", "value": attempt}}
            )  # fmt: skip
    file = tmp_path / "tasks.jsonl"
    assert run("calibration-set", "export", "tiny", str(file)).exit_code == 0
    assert run("calibration-set", "import", "tiny", str(file)).exit_code == 0
    with transaction(engine) as connection:
        keys = connection.execute(text("SELECT task_key FROM rollouts WHERE policy_id = :p"), {"p": policy})
        assert len(keys.all()) == 4
        features = connection.execute(text("SELECT DISTINCT text_digest FROM rollout_features")).all()
        tasks = connection.execute(text("SELECT DISTINCT task_key FROM rollouts")).all()
    assert (len(features), len(tasks)) == (1, 1)


def test_the_alert_on_silent_graders_knows_the_name_that_imports_go_by() -> None:
    (default,) = inspect.signature(calibration_sets.import_).parameters["grader"].default
    assert default == alerts.SPEAKS_ONCE
