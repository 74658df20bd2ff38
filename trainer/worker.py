"""The trainer: claim, restore, train, publish, commit; then the next batch.

    lease ─> claim batch ─> restore head ─> rows ─> one step ─> files ─> verify, probe ─> commit
      ^ heartbeat thread                      │ nothing to learn: no_step
      └───────────────────────────────────────┘

Invariants (design/lifecycle.md): weights in memory are used only under the token that loaded them,
and only for the version they are; whatever goes wrong after the claim, they are restored from the
store; only errors raised by rows, forward or backward count against a batch.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sqlalchemy import Engine

from service import telemetry
from service.adapters.signing import Signer, load_signer
from service.adapters.store import AdapterStore
from service.batches import leases, outcomes
from service.batches.claims import ClaimedBatch, claim_batch
from service.batches.leases import Activity, Lease
from service.batches.outcomes import Judgement, NoStep, Record, Step
from service.errors import AdapterRejected, LeaseLost, NotFound, TrainingFailed, Unavailable
from service.settings import Settings
from trainer import poison, publish
from trainer.distributed import SOLO, Team
from trainer.heartbeat import Heartbeat
from trainer.progress import Progress
from trainer.restore import Loaded, Restorer
from trainer.sequences import RolloutRows, build_rows
from trainer.step import StepResult, TrainingBatch, TrainingRollout
from trainer.tracking import StepReport, Tracking

KillPoint = Callable[[str], None]
"""Called with the name of each point where a crash must be harmless; tests kill the process there."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One trainer process; trains whichever policy has had a batch ready longest."""

    engine: Engine
    store: AdapterStore
    settings: Settings
    holder: str
    restorer: Restorer
    at: KillPoint = lambda point: None
    progress: Progress = field(default_factory=Progress)
    tracking: Tracking = field(default_factory=lambda: Tracking({}))
    team: Team = SOLO

    def run(self, stop: threading.Event) -> None:
        """Work until `stop`; then the batch in hand is finished and the lease released."""
        while not stop.is_set():
            try:
                policy = leases.policy_with_work(self.engine, self.holder)
                if policy is not None:
                    self.serve(policy, stop)
            except Unavailable as error:
                telemetry.logger().warning("database_unavailable", detail=error.detail)
            self._pause(stop)
        self.team.dismiss()

    def _pause(self, stop: threading.Event) -> None:
        self.team.wait()
        stop.wait(self.settings.trainer_interval_seconds)

    def serve(self, policy_id: int, stop: threading.Event) -> None:
        """Take a policy's lease and keep it, training its batches, until another policy waits."""
        lease = leases.claim(self.engine, policy_id, self.holder, self.settings.lease_seconds)
        if lease is None:
            return
        self.at("lease_taken")
        try:
            with Heartbeat(self.engine, lease, self.settings.lease_seconds) as heartbeat:
                while not stop.is_set() and leases.policy_with_work(self.engine, self.holder) in (
                    None,
                    policy_id,
                ):
                    if not self.train_next(lease, heartbeat):
                        heartbeat.say("idle")
                        self.progress.idle()
                        self._pause(stop)
        except LeaseLost as lost:
            telemetry.logger().warning("lease_lost", detail=lost.detail)
        self.restorer.forget()
        leases.release(self.engine, lease)

    def train_next(self, lease: Lease, heartbeat: Heartbeat) -> bool:
        """Claim and finish one batch; False when none is ready or trouble asks for a pause."""
        batch = claim_batch(self.engine, lease)
        if batch is None:
            return False
        self.at("batch_claimed")
        log = telemetry.logger().bind(policy=batch.policy, batch=batch.number, attempt=batch.attempt)
        if batch.deaths >= self.settings.deaths_per_batch:
            log.error("batch_keeps_killing_its_trainer", deaths=batch.deaths)
            outcomes.pause_policy(
                self.engine, lease, "trainer_deaths",
                f"{batch.deaths} trainers have died over batch {batch.number} without a report",
            )  # fmt: skip
            return False
        try:
            with telemetry.STEP_SECONDS.labels(batch.policy).time():
                self._train(lease, batch, heartbeat)
        except TrainingFailed as error:
            self._count_failure(lease, batch, error)
        except (AdapterRejected, NotFound, Unavailable, OSError) as error:
            # Storage, database and probe are not the batch's fault: put it back and try again later.
            log.error("step_not_published", error=type(error).__name__, detail=str(error))  # noqa: TRY400
            self.restorer.forget()
            outcomes.put_back(self.engine, lease, batch.id)
            return False
        return True

    def _train(self, lease: Lease, batch: ClaimedBatch, heartbeat: Heartbeat) -> None:
        self.progress.start(batch.policy, batch.number)
        self._say(heartbeat, "loading")
        loaded = self.restorer.restore(lease, batch)
        self._say(heartbeat, "training")
        with TemporaryDirectory(prefix="yoro-versions-") as scratch:
            versions = _Versions(self.store, batch, Path(scratch))
            rows = {m.rollout_id: self._rows(loaded, m.document, versions) for m in batch.members}
            self.at("rows_built")
            result = self.team.train_batch(
                loaded.policy, loaded.optimizer, training_batch(batch, rows), batch.settings,
                step_number=batch.head.depth + 1, load_version=versions.folder, advance=self.progress.advance,
            )  # fmt: skip
        self.at("stepped")
        figures = batch.figures | result.metrics
        metrics = {name: value for name, value in figures.items() if math.isfinite(value)}
        record = Record(_judgements(rows, result), result.policy_tokens, metrics)
        if result.outcome != "stepped":
            self._end_without_step(lease, batch, result.outcome, record)
            return
        self.restorer.forget()  # what is in memory is no published version until the commit
        self._say(heartbeat, "publishing")
        published = publish.publish(
            loaded.policy, loaded.optimizer, self.store,
            batch=batch, lease=lease, metrics=metrics, signer=self._signer(),
        )  # fmt: skip
        self.at("files_written")
        step = Step(batch.id, batch.head.version, batch.head.next_version, published, record)
        self._commit(lease, step)
        self.restorer.keep(lease, batch.head.next_version, loaded)
        self.at("committed")
        self._report(batch, "trained", batch.head.next_version, record)
        telemetry.logger().info(
            "version_published", policy=batch.policy, version=batch.head.next_version,
            batch=batch.number, reward=round(metrics.get("reward/mean", 0.0), 4),
            seconds=round(metrics.get("seconds", 0.0), 2),
        )  # fmt: skip

    def _say(self, heartbeat: Heartbeat, activity: Activity) -> None:
        heartbeat.say(activity)
        self.progress.activity = activity

    def _report(self, batch: ClaimedBatch, outcome: str, version: int | None, record: Record) -> None:
        """Tell Prometheus, trackers and whoever watches what became of a batch; the tables know already."""
        figures = record.metrics
        telemetry.count_step(
            batch.policy, outcome, version=version, figures=figures, policy_tokens=record.policy_tokens,
            reasons=[judgement.reason for judgement in record.judgements.values()],
        )  # fmt: skip
        self.tracking.report(StepReport(batch.policy, batch.number, outcome, version, figures))
        self.progress.finish(
            outcome, figures.get("reward/mean"), figures.get("kl_sample_train_v2"), figures.get("seconds")
        )

    def _rows(self, loaded: Loaded, document: dict[str, object], versions: "_Versions") -> RolloutRows:
        try:
            rows = build_rows(document, loaded.policy.tokenizer, loaded.settings.sequences)
        except (KeyError, TypeError, ValueError) as error:
            raise TrainingFailed(f"rows: {type(error).__name__}: {error}") from error
        gone = sorted(set(rows.versions) - versions.known)
        if not gone or rows.verdict == "exact":
            return rows
        return RolloutRows((), "untrainable", "version_gone", (f"version {gone[0]}",), 0, ())

    def _signer(self) -> Signer | None:
        key = self.settings.signing_key
        return load_signer(key) if key is not None else None

    def _commit(self, lease: Lease, step: Step) -> None:
        """Commit, and if the answer is lost, read back whether it happened; else once more."""
        self.at("before_commit")
        try:
            outcomes.commit_step(self.engine, lease, step)
        except Unavailable:
            if outcomes.committed_version(self.engine, lease, step.batch_id) is None:
                outcomes.commit_step(self.engine, lease, step)

    def _end_without_step(self, lease: Lease, batch: ClaimedBatch, outcome: NoStep, record: Record) -> None:
        outcomes.end_without_step(self.engine, lease, batch.id, outcome, record)
        self._report(batch, outcome, None, record)
        telemetry.logger().info("no_step", policy=batch.policy, batch=batch.number, outcome=outcome)

    def _count_failure(self, lease: Lease, batch: ClaimedBatch, error: TrainingFailed) -> None:
        self.restorer.forget()
        failures = outcomes.record_failure(self.engine, lease, batch.id, f"{error.code}: {error.detail}")
        log = telemetry.logger().bind(policy=batch.policy, batch=batch.number, failures=failures)
        log.error("training_failed", code=error.code, detail=error.detail)
        if failures < self.settings.failures_per_batch:
            return
        guilty = poison.find(self.restorer.restore(lease, batch), batch)
        self.restorer.forget()
        if not guilty or len(guilty) == len(batch.members) > 1:
            which = "every rollout fails alone" if guilty else "no rollout fails alone"
            log.error("no_culprit", found=which)
            outcomes.pause_policy(
                self.engine, lease, "failing_batch",
                f"batch {batch.number} failed {failures} times and {which}, so that none is excluded as "
                f"poison: {error.detail}",
            )  # fmt: skip
        else:
            log.error("poison_excluded", rollouts=sorted(guilty))
            outcomes.exclude_poison(self.engine, lease, batch.id, guilty)


@dataclass(frozen=True, slots=True)
class _Versions:
    """Folders of the versions that sampled a batch, fetched when asked for."""

    store: AdapterStore
    batch: ClaimedBatch
    scratch: Path

    @property
    def known(self) -> set[int]:
        """Return the versions whose files can be had; 0 needs none."""
        return set(self.batch.folders)

    def folder(self, version: int) -> Path | None:
        """Return a local folder with the version's adapter, None for the base."""
        stored = self.batch.folders[version]
        if stored is None:
            return None
        target = self.scratch / str(version)
        if not target.exists():
            self.store.download(stored, target, manifest_sha256=self.batch.manifests.get(version))
        return target


def training_batch(batch: ClaimedBatch, rows: dict[int, RolloutRows]) -> TrainingBatch:
    """Return the batch as the step takes it; the denominators are those of the claim."""
    weight = batch.settings.objective.turn_weight
    members = [
        TrainingRollout(
            rollout_id=member.rollout_id,
            rows=rows[member.rollout_id],
            advantage=member.advantage,
            reward=member.reward,
            version_is_head=member.version == batch.head.version,
            turns={turn: weight * advantage for turn, advantage in member.turns.items()},
        )
        for member in batch.members
    ]
    return TrainingBatch(members, batch.size, batch.tokens_per_rollout)


def _judgements(rows: dict[int, RolloutRows], result: StepResult) -> dict[int, Judgement]:
    gated = set(result.gated_out)
    return {
        rollout: Judgement(
            found.verdict,
            f"untrainable:{found.reason}"
            if found.verdict == "untrainable"
            else ("gated_out" if rollout in gated else ""),
        )
        for rollout, found in rows.items()
    }


def use_threads(threads: int) -> None:
    """Set the threads of this process's matrix products; 0 leaves torch's choice."""
    if threads:
        torch.set_num_threads(threads)
