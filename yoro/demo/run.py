"""`yoro demo`: `yoro up`, a real agent, a real grader, and a screen that says what happens.

Everything goes the way production would: traces and grades over HTTP with keys of their roles,
adapters pulled and verified. Held-out tasks are never posted. What is printed was measured.

    task stream ─> agent ──POST /v1/traces──> api ─> scheduler ─> trainer ─┐
         ^           └─> grader ─(late, out of order)─POST /v1/rewards     │
         └────────────────── agent pulls the newest adapter <──────────────┘
"""

import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from service.policies import locate_base_model
from service.settings import Settings
from yoro.client import Client
from yoro.demo import preset, tasks
from yoro.demo.agent import Agent, as_trace
from yoro.demo.grader import LateGrader
from yoro.demo.screen import Screen
from yoro.demo.sending import KafkaSender, Sender
from yoro.demo.tasks import DemoTask
from yoro.ports import free_port
from yoro.pull import pull
from yoro.supervisor import Up, share_cores

POLICY = "demo"
BASE_MODEL = "smollm2-135m"
STALL_SECONDS = 600.0
"""Without a new version for so long the demo gives up rather than wait for ever."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a demo measured; `improved` is a difference of at least two standard errors."""

    held_out_before: float
    held_out_after: float
    difference: float
    difference_standard_error: float
    held_out_tasks: int
    versions: int
    rollouts_trained: int
    b_eff_ratio: float | None
    seconds: float
    seed: int

    @property
    def improved(self) -> bool:
        """Tell whether the paired difference is at least two standard errors."""
        return self.difference >= 2 * self.difference_standard_error and self.difference > 0


def run_demo(
    *,
    steps: int | None = None,
    seed: int = 0,
    data: Path | None = None,
    port: int = 0,
    report: Path | None = None,
    via_kafka: bool = False,
) -> bool:
    """Run the demo and print its table; return whether the model improved on the held-out tasks."""
    share_cores()
    console = Console(highlight=False)
    steps = steps or preset.DEFAULT_STEPS
    started = time.monotonic()
    folder = data or _new_folder()
    console.print(f"data, logs and adapters of this demo: {folder.resolve()}")
    with _running(folder, port or free_port(), console, free_port() if via_kafka else 0) as up:
        if via_kafka:
            console.print(
                f"agent and grader publish to Kafka at 127.0.0.1:{up.kafka_port}; nothing is posted"
            )
        demo = _Demo(up, folder, seed, steps, Screen(console, steps))
        measured = demo.run()
    found = Report(**measured, seconds=round(time.monotonic() - started, 1), seed=seed)
    Screen.table(console, asdict(found), improved=found.improved)
    console.print(f"look around: yoro up --data {folder}   then http://127.0.0.1:8080/docs")
    console.print(f"adapters: {folder / 'adapters' / POLICY} (all), {folder / 'pulled' / 'current'} (pulled)")
    if report is not None:
        report.write_text(json.dumps(asdict(found), indent=2) + "\n")
    return found.improved


@dataclass(frozen=True, slots=True)
class _Demo:
    """One demo over a running installation."""

    up: Up
    folder: Path
    seed: int
    steps: int
    screen: Screen

    def run(self) -> dict[str, Any]:
        """Measure, train, measure again."""
        admin = Client(self.up.url, self.up.key_file.read_text().strip())
        admin.create_policy(POLICY, base_model=BASE_MODEL, **preset.SETTINGS)
        self.screen.say("loading SmolLM2-135M-Instruct for the agent")
        agent = Agent(locate_base_model(BASE_MODEL, None, None))
        held_out = tasks.held_out()
        self.screen.say(f"answering {len(held_out)} held-out tasks with the base model")
        before = _scores(agent, held_out)
        with LateGrader(self.sender(admin, "grader"), POLICY, self.seed) as grader:
            self.serve(admin, agent, grader)
        self.screen.say(f"answering the same {len(held_out)} tasks with the newest version")
        self.follow(admin, agent)
        after = _scores(agent, held_out)
        self.screen.close()
        return {**_compare(before, after), **self.totals(admin)}

    def serve(self, admin: Client, agent: Agent, grader: LateGrader) -> None:
        """Attempt one task after the other until enough versions are published."""
        posting = self.sender(admin, "agent")
        stream = tasks.stream(self.seed)
        size = int(preset.SETTINGS["batching"]["size"])
        moved = time.monotonic()
        while True:
            status = admin.status(POLICY)
            self.screen.show(status, grader.mean_reward())
            if status["head_version"] >= self.steps:
                return
            if self.follow(admin, agent):
                moved = time.monotonic()
            if time.monotonic() - moved > STALL_SECONDS:
                raise TimeoutError(f"No new version for {STALL_SECONDS:.0f} s; see {self.folder}/logs")
            if _in_flight(status) >= size:
                # The next version is on its way. Sampling now would gain nothing where agent and trainer
                # share the cores, and a rollout of the version that trains it learns best.
                time.sleep(0.3)
                continue
            for attempt in agent.attempt(list(itertools.islice(stream, size))):
                trace = as_trace(attempt, POLICY)
                grader.expect(trace["trace_id"], attempt.task, attempt.text)
                posting.post_trace(trace)

    def follow(self, admin: Client, agent: Agent) -> bool:
        """Pull the newest version if there is a new one, and sample from it; tell whether there was."""
        version = int(admin.adapter(POLICY)["version"])
        if version == agent.version:
            return False
        agent.load_adapter(pull(admin, POLICY, self.folder / "pulled", str(version)), version)
        return True

    def totals(self, admin: Client) -> dict[str, Any]:
        """Return what the service counted."""
        status = admin.status(POLICY)
        return {
            "versions": status["head_version"],
            "rollouts_trained": status["rollouts"]["trained"],
            "b_eff_ratio": status["baseline"]["b_eff_ratio"],
        }

    def sender(self, admin: Client, role: str) -> Sender:
        """Return how an agent or a grader sends what it has: by HTTP with a key of its role, or by Kafka."""
        if self.up.kafka_port:
            return KafkaSender(self.up.settings, self.up.kafka_port)
        return self.client(admin, role)

    def client(self, admin: Client, role: str) -> Client:
        """Return a client whose key has one role on this policy, as a production agent's would."""
        key = admin.create_key(f"demo {role}", [role], [POLICY], None)["key"]
        return Client(self.up.url, key)


@contextmanager
def _running(folder: Path, port: int, console: Console, kafka_port: int) -> Iterator[Up]:
    """Run `yoro up` while the block runs; its processes are watched from a thread."""
    up = Up(Settings(data=folder), "127.0.0.1", port, log=console.print, kafka_port=kafka_port)
    up.start(None)
    stop = threading.Event()
    watching = threading.Thread(target=up.watch, args=(stop,), name="up", daemon=True)
    watching.start()
    try:
        yield up
    finally:
        stop.set()
        watching.join()
        up.stop()


def _scores(agent: Agent, held_out: list[DemoTask]) -> list[float]:
    answers = agent.answer_greedily(held_out)
    return [tasks.grade(task, answer) for task, answer in zip(held_out, answers, strict=True)]


def _compare(before: list[float], after: list[float]) -> dict[str, Any]:
    """Return means, paired difference and its standard error, sd(after - before) / sqrt(n)."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    return {
        "held_out_before": statistics.fmean(before),
        "held_out_after": statistics.fmean(after),
        "difference": statistics.fmean(differences),
        "difference_standard_error": statistics.stdev(differences) / len(differences) ** 0.5,
        "held_out_tasks": len(before),
    }


def _in_flight(status: dict[str, Any]) -> int:
    counts = status["rollouts"]
    return int(counts["waiting_reward"] + counts["ready"] + counts["batched"])


def _new_folder() -> Path:
    parent = Path("yoro-data")
    parent.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("demo-%Y%m%d-%H%M%S-"), dir=parent))
