"""`yoro calibration-set export | import`: tasks with known rewards, out of a policy's rollouts and into them.

A file's lines are those of `service.baselines.calibration_sets`. Import takes the public door: what it
brings are rollouts without an answer, graded, which serve baselines as history and are never trained.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
) -> None:
    """Write the tasks that recur, with the rewards that the present rule gives; runs on a server."""
    from service.batches import calibration_export
    from service.database import engine as database
    from service.settings import Settings

    wanted = calibration_export.Wanted(policy, oldest, newest, minimum_rewards)
    engine = database.connect(database_url or Settings().database_url, name="calibration-set export")
    try:
        with database.transaction(engine) as connection:
            left_out = calibration_export.outdated(connection, wanted)
            tasks, rewards, versions = _write(calibration_export.export(connection, wanted), file)
    finally:
        engine.dispose()
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
        rule = client.policy(policy)["settings"]["reward"]
        _require_reward(rule, grader)
        brought = given(policy=policy, policy_version=policy_version)
        refused = [why for each in _rounds(tasks) for why in _send(client, brought, each, grader, rule)]
    for why in refused[:SHOWN_PROBLEMS]:
        print(f"refused: {why}", file=sys.stderr)
    rewards = sum(len(task["rewards"]) for task in tasks)
    if refused:
        print(f"{len(refused)} of {rewards} rewards were refused", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{rewards} rewards of {len(tasks)} tasks serve {policy} as history")


def _tasks(file: Path) -> list[dict[str, Any]]:
    from service.baselines.calibration_sets import checked_line

    try:
        with file.open(encoding="utf-8") as lines:
            tasks = [checked_line(line, number) for number, line in enumerate(lines, 1) if line.strip()]
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
    brought: dict[str, Any],
    attempts: Sequence[tuple[Mapping[str, Any], int]],
    graders: Sequence[str],
    rule: Mapping[str, Any],
) -> list[str]:
    """Post attempts and their grades; return why some were refused."""
    traces = [brought | _trace(task, number) for task, number in attempts]
    answers = client.post_traces(traces)
    low, high = rule["value_range"]
    grades = [
        {"policy": brought["policy"], "trace_id": trace["trace_id"], "grader": name,
         "value": low + (high - low) * task["rewards"][number]}
        for (task, number), trace, answer in zip(attempts, traces, answers, strict=True)
        if not answer.get("problem")
        for name in graders
    ]  # fmt: skip
    answers += client.post_rewards(grades)
    return [answer["problem"]["detail"] for answer in answers if answer.get("problem")]


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
