"""The verbs on baselines: real files, a real database and server, what they print and how they end."""

import json
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from sqlalchemy import Engine

from service.baselines.calibration import ESTIMATED
from service.baselines.selection import CANDIDATES
from tests import training_ground
from tests.yoro.commands import run
from yoro.cli import main

KINDS = {"Add the numbers": 0.9, "Write a poem on": 0.1}


def calibration_file(path: Path, tasks: int) -> Path:
    """Tasks of two kinds, one easy, one hard, with three rewards each."""
    rng = np.random.default_rng(0)
    lines = [
        {
            "task_id": f"t{number}", "prompt": f"{kind} {number}",
            "rewards": [int(reward) for reward in rng.random(3) < mean],
        }
        for number, (kind, mean) in enumerate(list(KINDS.items()) * (tasks // 2))
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_calibrate_prints_a_table_and_writes_report_and_picture(tmp_path: Path) -> None:
    file, out, plot = calibration_file(tmp_path / "t.jsonl", 40), tmp_path / "r.json", tmp_path / "r.png"
    done = run(
        "calibrate", str(file), "--batch-size", "8", "--replays", "4", "--out", str(out), "--plot", str(plot)
    )
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert list(report["estimators"]) == list(ESTIMATED)
    assert report["tasks"] == 40
    assert report["settings"]["batches"] == 20
    score = report["estimators"]["gaussian_process"]
    assert score["ratio"]["low"] > 1.0
    assert f"{score['ratio']['value']:.3f}  [{score['ratio']['low']:.3f}" in done.stdout
    assert report["estimators"]["leave_one_out"]["ratio"]["value"] == 1.0
    picture = matplotlib.image.imread(plot)
    assert picture.shape[0] > 300
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 10


@pytest.mark.parametrize(
    ("second", "options", "said"),
    [
        ('{"task_id": "b", "rewards": [1, 0]}', (), "line 41: `prompt` must be a string"),
        ('{"task_id": "b", "prompt": "p", "rewards": [1, 2]}', (), "line 41: `rewards` holds 2"),
        ("", ("--minimum-rewards", "4"), "none of 40 tasks has 4 rewards"),
        ("", ("--estimators", "ema,oracle"), "no estimator oracle; there are leave_one_out"),
    ],
)
def test_calibrate_names_what_is_wrong(
    tmp_path: Path, second: str, options: tuple[str, ...], said: str
) -> None:
    file = calibration_file(tmp_path / "t.jsonl", 40)
    file.write_text(file.read_text() + second)
    done = run("calibrate", str(file), *options)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_a_file_that_is_not_there_is_one_line_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["yoro", "calibrate", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "No such file" in capsys.readouterr().err


@pytest.mark.usefixtures("served")
def test_bakeoff_ranks_the_estimators_of_logged_batches(engine: Engine) -> None:
    policy = training_ground.make_policy(engine, training_ground.tiny_settings())
    assert "no batch with logged errors yet" in run("bakeoff", "--policy", "tiny").stdout
    training_ground.add_rollouts(engine, policy, training_ground.tiny_settings(), 3 * training_ground.BATCH)
    assert training_ground.form_batches(engine) == 3
    done = run("bakeoff", "--policy", "tiny")
    assert done.exit_code == 0
    for name in CANDIDATES:
        assert name in done.stdout
    assert "gaussian_process (in use)" in done.stdout
    row = next(line for line in done.stdout.splitlines() if "leave_one_out" in line)
    assert "1.00" in row
    assert row.rstrip(" │┃").endswith("3")
    assert run("bakeoff", "--policy", "nobody").exit_code == 1


def test_group_size_compares_with_groups() -> None:
    done = run("group-size", "--rho", "0.4", "--kappa", "0")
    assert done.exit_code == 0
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line
    ]
    assert rows[:2] == [["1", "1.400", "1.00", ""], ["2", "2.000", "1.43", "1.000"]]
    assert run("group-size", "--rho", "-1").exit_code == 2
