"""Single posts: traces against the bare app, rewards against traces, latency at one connection."""

from dataclasses import dataclass
from statistics import median

from benchmarks.intake import documents
from benchmarks.intake.servers import Installation, Process
from benchmarks.intake.wrk import PLACE, Load, load
from benchmarks.report import Report

TRACE = documents.encoded(documents.trace(PLACE))
GRADE = documents.encoded(documents.grade(PLACE))


@dataclass(frozen=True, slots=True)
class Arms:
    """The servers that are compared."""

    bare: Process
    api: Process
    kept: Process
    """Another api process, kept on one core."""


@dataclass(frozen=True, slots=True)
class Run:
    """One round of all arms."""

    bare: Load
    traces: Load
    kept: Load
    rewards: Load


def measure(report: Report, where: Installation, arms: Arms, *, seconds: float, repeats: int) -> None:
    """Alternate the arms, so that what else the machine does hits all alike; report medians of ratios."""
    for connections in (16, 64):
        runs = [
            _run(where, arms, connections=connections, seconds=seconds, run=f"{connections}-{n}")
            for n in range(repeats)
        ]
        _report(report, runs, f"at {connections} connections")
    _alone(report, where, arms.api, seconds, repeats)


def _run(where: Installation, arms: Arms, *, connections: int, seconds: float, run: str) -> Run:
    def sent(process: Process, path: str, body: bytes, run: str = run) -> Load:
        return load(process.url, path, where.key, body, connections=connections, seconds=seconds, run=run)

    return Run(
        bare=sent(arms.bare, "/v1/traces", TRACE),
        kept=sent(arms.kept, "/v1/traces", TRACE, run=f"{run}-kept"),
        traces=sent(arms.api, "/v1/traces", TRACE),
        # The rewards are of the traces that came just now: each changes a gate.
        rewards=sent(arms.api, "/v1/rewards", GRADE),
    )


def _report(report: Report, runs: list[Run], at: str) -> None:
    report.add(f"bare app, pydantic body {at}", median(run.bare.rate for run in runs), "requests/s")
    report.add(f"single traces {at}", median(run.traces.rate for run in runs), "traces/s")
    for name, ratios in (
        ("single traces over the bare app", (run.traces.rate / run.bare.rate for run in runs)),
        ("single traces, the api kept on a core, over it", (run.kept.rate / run.bare.rate for run in runs)),
    ):
        report.add(f"{name} {at}", median(ratios), "ratio", 0.4)
    tail = median(run.traces.p99 / run.traces.p50 for run in runs)
    report.add(f"p99 over median latency of single traces {at}", tail, "ratio", 10, "less")
    report.add(f"single rewards {at}", median(run.rewards.rate for run in runs), "rewards/s")
    ratio = median(run.rewards.rate / run.traces.rate for run in runs)
    report.add(f"single rewards over single traces {at}", ratio, "ratio", 1.0)
    loads = [each for run in runs for each in (run.bare, run.traces, run.kept, run.rewards)]
    faults = sum(each.refused + each.broken for each in loads)
    report.add(f"requests refused or broken {at}", faults, "requests", 0, "less")


def _alone(report: Report, where: Installation, api: Process, seconds: float, repeats: int) -> None:
    runs = [
        load(api.url, "/v1/traces", where.key, TRACE, connections=1, seconds=seconds, run=f"alone-{n}")
        for n in range(repeats)
    ]
    report.add(
        "median latency of a single trace at 1 connection", median(r.p50 for r in runs), "ms", 2.0, "less"
    )
