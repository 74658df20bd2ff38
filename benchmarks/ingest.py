"""`make bench-ingest`: the figures of intake, each beside its bound.

    python -m benchmarks.ingest [--seconds 5] [--repeats 3] [--growth-rows 1000000]
                                [--soak-seconds 600] [--kills 20] [--only PART]

One api process, auth on, Postgres on the same cores with fsync and synchronous_commit on, documents of
about 4 KB, load from wrk. Arms alternate, and ratios are taken run by run. `rivals` installs MLflow and
Phoenix into environments of their own (1.2 GB).
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.intake import batch, crash, growth, rivals, servers, single, soak
from benchmarks.report import Report

PARTS = ("single", "batch", "crash", "growth", "soak", "rivals")


def main() -> int:
    """Measure, print and write; return 1 where a figure falls short."""
    asked = _arguments()
    holds = [_part(part, asked) for part in asked.only or PARTS]
    return 0 if all(holds) else 1


def _part(part: str, asked: argparse.Namespace) -> bool:
    """Measure one part and write its figures, to a file of its own; tell whether all hold."""
    print(f"-- {part}", flush=True)
    report = Report(f"ingest-{part}", "python -m benchmarks.ingest " + " ".join(sys.argv[1:]))
    _MEASURES[part](report, asked)
    return report.write()


def _single(report: Report, asked: argparse.Namespace) -> None:
    with _started() as (where, stack):
        api = stack.enter_context(servers.running(servers.start_api(where)))
        bare = stack.enter_context(servers.running(servers.start_bare(where)))
        on_core = servers.start_api(where, {"YORO_API_CORE": "0"}, port=servers.KEPT_PORT)
        kept = stack.enter_context(servers.running(on_core))
        arms = single.Arms(bare, api, kept)
        single.measure(report, where, arms, seconds=asked.seconds, repeats=asked.repeats)


def _batch(report: Report, asked: argparse.Namespace) -> None:
    with _started() as (where, stack):
        api = stack.enter_context(servers.running(servers.start_api(where)))
        batch.measure(report, where, api, asked.seconds, asked.repeats)


def _crash(report: Report, asked: argparse.Namespace) -> None:
    with _started() as (where, _):
        crash.measure(report, where, asked.kills, 500)


def _growth(report: Report, asked: argparse.Namespace) -> None:
    with _started() as (empty, stack):
        grown = stack.enter_context(servers.installation())
        growth.measure(
            report, empty, grown, rows=asked.growth_rows, seconds=asked.seconds, repeats=asked.repeats
        )


def _soak(report: Report, asked: argparse.Namespace) -> None:
    with _started() as (where, _):
        soak.measure(report, where, asked.soak_seconds)


def _rivals(report: Report, asked: argparse.Namespace) -> None:
    with _started() as (where, _):
        rivals.measure(report, where, max(asked.seconds, 10.0))


_MEASURES = {
    "single": _single, "batch": _batch, "crash": _crash, "growth": _growth, "soak": _soak, "rivals": _rivals,
}  # fmt: skip


@contextmanager
def _started() -> Iterator[tuple[servers.Installation, ExitStack]]:
    """Run an installation, with a stack for what runs over it."""
    with ExitStack() as stack:
        yield stack.enter_context(servers.installation()), stack


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run of each arm")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm")
    parser.add_argument("--growth-rows", type=int, default=1_000_000)
    parser.add_argument("--soak-seconds", type=float, default=600.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; repeatable")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
