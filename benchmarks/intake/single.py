"""Single posts: traces against the bare app, rewards against traces, latency at one connection."""

from statistics import median

from benchmarks.intake import documents
from benchmarks.intake.servers import Installation, Process
from benchmarks.intake.wrk import PLACE, Load, load
from benchmarks.report import Report

TRACE = documents.encoded(documents.trace(PLACE))
GRADE = documents.encoded(documents.grade(PLACE))


def measure(
    report: Report, where: Installation, api: Process, bare: Process, *, seconds: float, repeats: int
) -> None:
    """Alternate the arms, so that what else the machine does hits both alike; report medians of ratios."""
    for connections in (16, 64):
        runs = [
            _run(where, api, bare, connections=connections, seconds=seconds, run=f"{connections}-{n}")
            for n in range(repeats)
        ]
        at = f"at {connections} connections"
        report.add(f"bare app, pydantic body {at}", median(run[0].rate for run in runs), "requests/s")
        report.add(f"single traces {at}", median(run[1].rate for run in runs), "traces/s")
        ratio = median(traces.rate / other.rate for other, traces, _ in runs)
        report.add(f"single traces over the bare app {at}", ratio, "ratio", 0.4)
        tail = median(traces.p99 / traces.p50 for _, traces, _ in runs)
        report.add(f"p99 over median latency of single traces {at}", tail, "ratio", 10, "less")
        report.add(f"single rewards {at}", median(run[2].rate for run in runs), "rewards/s")
        ratio = median(rewards.rate / traces.rate for _, traces, rewards in runs)
        report.add(f"single rewards over single traces {at}", ratio, "ratio", 1.0)
        report.add(f"requests refused or broken {at}", _faults(runs), "requests", 0, "less")
    _alone(report, where, api, seconds, repeats)


def _run(
    where: Installation, api: Process, bare: Process, *, connections: int, seconds: float, run: str
) -> tuple[Load, Load, Load]:
    def sent(process: Process, path: str, body: bytes) -> Load:
        return load(process.url, path, where.key, body, connections=connections, seconds=seconds, run=run)

    other = sent(bare, "/v1/traces", TRACE)
    traces = sent(api, "/v1/traces", TRACE)
    # The rewards are of the traces that came just now: each changes a gate.
    return other, traces, sent(api, "/v1/rewards", GRADE)


def _faults(runs: list[tuple[Load, Load, Load]]) -> int:
    return sum(one.refused + one.broken for run in runs for one in run)


def _alone(report: Report, where: Installation, api: Process, seconds: float, repeats: int) -> None:
    runs = [
        load(api.url, "/v1/traces", where.key, TRACE, connections=1, seconds=seconds, run=f"alone-{n}")
        for n in range(repeats)
    ]
    report.add(
        "median latency of a single trace at 1 connection", median(r.p50 for r in runs), "ms", 2.0, "less"
    )
