"""`yoro calibration-set export | import`: tasks with known rewards, out of a policy's rollouts and into them.

A file's lines are those of `service.baselines.calibration_sets`. Import takes the public door: what it
brings are rollouts without an answer, graded, which serve baselines as history and are never trained.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from yoro.cli.connection import DEFAULT_DATA, DEFAULT_URL, Data, Key, Url, connect
from yoro.cli.processes import Database
from yoro.client import Client
from yoro.retries import given

if TYPE_CHECKING:
    from service.batches.calibration_export import Exported

SHOWN_PROBLEMS = 5
_BY_FEATURES = re.compile(r"features:[0-9a-f]{64}")

app = typer.Typer(help="Tasks with known rewards: to measure with, to start from.", no_args_is_help=True)


@app.command()
def export(
    policy: Annotated[str, typer.Argument(help="Whose logged rollouts.")],
    file: Annotated[Path, typer.Argument(help="Where to write the lines that `yoro calibrate` reads.")],
    *,
    oldest: Annotated[int | None, typer.Option(min=0, help="First version that counts.")] = None,
    newest: Annotated[int | None, typer.Option(min=0, help="Last version that counts.")] = None,
    minimum_rewards: Annotated[int, typer.Option(min=2, help="Leave other tasks out.")] = 2,
    database_url: Database = None,
    data: Data = DEFAULT_DATA,
) -> None:
    """Write the tasks that recur, with the rewards that the present rule gives; runs on a server."""
    from service.batches import calibration_export
    from service.database.engine import transaction
    from yoro.cli.server import server

    wanted = calibration_export.Wanted(policy, oldest, newest, minimum_rewards)
    with (
        server("calibration-set export", database_url, data) as (engine, _),
        transaction(engine) as connection,
    ):
        left_out = calibration_export.outdated(connection, wanted)
        tasks, rewards, versions = _write(calibration_export.export(connection, wanted), file)
    if left_out:
        print(f"{left_out} rollouts left out: an earlier reward rule made their rewards")
    if not tasks:
        raise typer.BadParameter(f"no task of {policy} has {minimum_rewards} rewards")
    span = f"versions {min(versions)} to {max(versions)}" if versions else "no stated version"
    print(f"{tasks} tasks with {rewards} rewards of {span}: {file}")


@app.command("import")
def import_(
    policy: Annotated[str, typer.Argument(help="Whose baselines are to know these tasks.")],
    file: Annotated[Path, typer.Argument(help="Lines as `yoro calibrate` reads them; one reward is enough.")],
    *,
    grader: Annotated[
        list[str], typer.Option(help="Who says the rewards; repeat it where the policy's rule needs several.")
    ] = ["calibration"],  # noqa: B006 - typer copies it
    policy_version: Annotated[
        int | None, typer.Option(min=0, help="Version that earned the rewards; none: version 0's age.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    data: Data = DEFAULT_DATA,
) -> None:
    """Start a policy's baselines from tasks with known rewards; safe to repeat."""
    tasks = _tasks(file)
    with connect(url, key, data) as client:
        settings = client.policy(policy)["settings"]
        _require_reward(settings["reward"], grader)
        low, high = settings["reward"]["value_range"]
        # A file that was changed says what is true now, also where an earlier one said the same before.
        said_at = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat()
        said = [{"policy": policy, "grader": name, "graded_at": said_at} for name in grader]
        brought = given(policy=policy, policy_version=policy_version)
        refused = []
        for attempts in _rounds(tasks):
            values = [low + (high - low) * task["rewards"][number] for task, number in attempts]
            refused += _send(client, [brought | _trace(*each) for each in attempts], values, said)
    for why in refused[:SHOWN_PROBLEMS]:
        print(f"refused: {why}", file=sys.stderr)
    rewards = sum(len(task["rewards"]) for task in tasks)
    if refused:
        print(f"{len(refused)} of {rewards} rewards were refused", file=sys.stderr)
        raise typer.Exit(1)
    window = settings["baseline"]["window_batches"] * settings["batching"]["size"]
    seen = "" if rewards <= window else f"; a batch sees the newest {window}"
    print(f"{rewards} rewards of {len(tasks)} tasks are stored as history of {policy}{seen}")


def _tasks(file: Path) -> list[dict[str, Any]]:
    from service.baselines.calibration_sets import checked_lines

    try:
        with file.open(encoding="utf-8-sig") as lines:
            tasks = checked_lines(lines)
    except ValueError as error:
        raise typer.BadParameter(f"{file}: {error}") from error
    if not any(task["rewards"] for task in tasks):
        raise typer.BadParameter(f"{file} holds no reward")
    return tasks


def _require_reward(rule: Mapping[str, Any], graders: Sequence[str]) -> None:
    """Refuse graders by whom the policy's rule would make no reward."""
    if silent := [name for name in rule["require"] if name not in graders]:
        raise typer.BadParameter(f"the policy's rule requires {', '.join(silent)}", param_hint="--grader")
    if rule["rule"] == "weighted" and not any(rule["weights"].get(name) for name in graders):
        names = ", ".join(name for name, weight in rule["weights"].items() if weight)
        raise typer.BadParameter(f"the policy's rule weighs {names} alone", param_hint="--grader")


def _rounds(tasks: Sequence[Mapping[str, Any]]) -> Iterator[list[tuple[Mapping[str, Any], int]]]:
    """Group attempts, one a task, the fullest group last: the newest history holds the most tasks."""
    numbered = ([(task, n) for task in tasks if len(task["rewards"]) > n] for n in count())
    yield from reversed(list(takewhile(bool, numbered)))


def _send(
    client: Client,
    traces: Sequence[dict[str, Any]],
    values: Sequence[float],
    said: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Post attempts and the grades that each of `said` gives them; return why some were refused."""
    answers = client.post_traces(traces)
    refused = {
        trace["trace_id"]: f"{_named(trace)}: {why}"
        for trace, answer in zip(traces, answers, strict=True)
        if (why := _obstacle(trace, answer))
    }
    grades = [
        {**grade, "trace_id": trace["trace_id"], "value": value}
        for trace, value in zip(traces, values, strict=True)
        if trace["trace_id"] not in refused
        for grade in said
    ]
    names = {trace["trace_id"]: _named(trace) for trace in traces}
    for grade, answer in zip(grades, client.post_rewards(grades), strict=True):
        if answer.get("problem"):
            refused[grade["trace_id"]] = f"{names[grade['trace_id']]}: {answer['problem']['detail']}"
    return list(refused.values())


def _obstacle(trace: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """Say why an attempt is no history as asked for; empty: it is."""
    if problem := answer.get("problem"):
        return str(problem["detail"])
    unknown = "unknown_version" in answer["trainability"]["reasons"]
    return f"there is no version {trace['policy_version']}" if unknown else ""


def _named(trace: Mapping[str, Any]) -> str:
    """Name an attempt by its task, as the file does."""
    return f"task {trace.get('task_id', trace['trace_id'])!r:.80}"


def _trace(task: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Make an attempt without an answer: it teaches baselines, and training refuses it."""
    from service.baselines.calibration_sets import prompt_messages

    digest = hashlib.sha256(task["task_id"].encode()).hexdigest()[:32]
    trace = {
        "trace_id": f"calibration-{digest}-{number}",
        # a task that had no id is known by its features, as it will be among the policy's rollouts
        "task_id": None if _BY_FEATURES.fullmatch(task["task_id"]) else task["task_id"],
        "messages": prompt_messages(task), "tools": task.get("tools"), "context": task.get("context"),
        # attempts at one task must differ, or they would count as one that was delivered twice
        "metadata": {"calibration_attempt": number},
    }  # fmt: skip
    return given(**trace)


def _write(exported: "Iterable[Exported]", file: Path) -> tuple[int, int, set[int]]:
    """Write the lines, all or nothing; return tasks, rewards and the outermost versions."""
    tasks, rewards, versions = 0, 0, set[int]()
    partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as out:
            for task in exported:
                out.write(task.line + "\n")
                tasks, rewards = tasks + 1, rewards + task.rewards
                versions |= {version for version in (task.oldest, task.newest) if version is not None}
        if tasks:
            partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return tasks, rewards, versions
