"""Gated promotion: the newest version is judged by gates and hook, and promoted if all of them pass.

Any number of processes may run it: a version is judged by one at a time, whose claim runs out if it
dies. Invariants: a verdict is recorded whatever it is, and is final; a verdict never moves a pointer
that somebody holds, nor one that has gone further meanwhile, nor to a version rewound away.
"""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, text

from service import telemetry
from service.adapters import hooks, pointers
from service.adapters.hooks import Answer, HookFailed
from service.database.engine import transaction
from service.eligibility import Promotion
from service.errors import Unavailable, YoroError
from service.settings import Settings

INTERVAL_SECONDS = 1.0
MOST_ATTEMPTS = 5
"""Judges that may die over one version before nobody tries again."""

# `attempts` tells two that claim at once apart: the second finds it raised already.
_CLAIM = text("""
WITH due AS (
    SELECT l.policy_id, l.head_version AS version, coalesce(c.attempts, 0) + 1 AS attempts
    FROM lineages l
    JOIN policies p ON p.id = l.policy_id
    JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
    LEFT JOIN promotion_checks c ON c.policy_id = l.policy_id AND c.version = l.head_version
    WHERE s.document #>> '{promotion,mode}' = 'gated' AND NOT l.promotion_held
      AND l.head_version <> l.promoted_version AND l.head_version > 0
      AND (c.version IS NULL OR (c.finished_at IS NULL AND c.attempts < :most AND c.started_at
           < clock_timestamp() - make_interval(
               secs => 60 + (s.document #>> '{promotion,hook_timeout_seconds}')::float8)))
    ORDER BY l.policy_id LIMIT 1
)
INSERT INTO promotion_checks AS c (policy_id, version, attempts)
SELECT policy_id, version, attempts FROM due
ON CONFLICT (policy_id, version) DO UPDATE SET attempts = excluded.attempts, started_at = clock_timestamp()
WHERE c.finished_at IS NULL AND c.attempts = excluded.attempts - 1
RETURNING c.policy_id, c.version, c.attempts
""")

_CANDIDATE = text("""
SELECT p.name AS policy, v.version, v.parent, v.manifest, v.tainted, l.promoted_version, s.document,
       (SELECT avg(m.reward - m.baseline) FROM batch_members m WHERE m.batch_id = v.batch_id) AS net_reward
FROM policy_versions v
JOIN policies p ON p.id = v.policy_id
JOIN lineages l ON l.policy_id = v.policy_id
JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
WHERE v.policy_id = :policy AND v.version = :version
""")

_CONCLUDE = text("""
UPDATE promotion_checks SET finished_at = clock_timestamp(), passed = :passed, reason = :reason,
    metrics = CAST(:metrics AS jsonb)
WHERE policy_id = :policy AND version = :version AND attempts = :attempts AND finished_at IS NULL
RETURNING version
""")

_STILL_WANTED = text("""
SELECT NOT l.promotion_held AND NOT v.rewound AND v.files_removed_at IS NULL AND v.tainted = '{}'
       AND v.depth > serving.depth AND s.document #>> '{promotion,mode}' = 'gated'
FROM lineages l
JOIN policies p ON p.id = l.policy_id
JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision
JOIN policy_versions v ON v.policy_id = l.policy_id AND v.version = :version
JOIN policy_versions serving ON serving.policy_id = l.policy_id AND serving.version = l.promoted_version
WHERE l.policy_id = :policy
""")

_VERDICTS = text("""
SELECT version, started_at, finished_at, passed, reason, metrics FROM promotion_checks
WHERE policy_id = :policy ORDER BY version DESC LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that wants to serve, and what it is judged by."""

    policy: str
    version: int
    parent: int | None
    promoted_version: int
    manifest: dict[str, Any]
    tainted: list[str]
    net_reward: float | None
    promotion: Promotion


@dataclass(slots=True)
class Verdict:
    """What gates and hook found; passed iff nothing failed."""

    failed: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Promoter:
    """Judges candidates until told to stop."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        """Take the process's engine and the server's settings."""
        self._engine, self._settings = engine, settings

    def run(self, stop: threading.Event) -> None:
        """Loop until `stop`; a database that does not answer is waited for."""
        while not stop.is_set():
            try:
                judged = self.tick()
            except Unavailable as error:
                telemetry.logger().warning("database_unavailable", detail=error.detail)
                judged = False
            if not judged:
                stop.wait(INTERVAL_SECONDS)

    def tick(self) -> bool:
        """Judge one version if one is due; tell whether there was one."""
        with transaction(self._engine) as connection:
            claim = connection.execute(_CLAIM, {"most": MOST_ATTEMPTS}).one_or_none()
        if claim is None:
            return False
        with transaction(self._engine) as connection:
            candidate = _candidate(connection, claim.policy_id, claim.version)
        verdict = judge(candidate, self._settings)
        with transaction(self._engine) as connection:
            promoted = conclude(connection, claim.policy_id, claim.version, claim.attempts, verdict)
        telemetry.logger().info(
            "version_judged", policy=candidate.policy, version=claim.version, failed=verdict.failed,
            promoted=promoted,
        )  # fmt: skip
        return True


def judge(candidate: Candidate, settings: Settings) -> Verdict:
    """Apply the built-in gates, and the hook if they pass."""
    verdict, wanted = Verdict(), candidate.promotion
    if candidate.tainted:
        verdict.failed.append(f"tainted: {', '.join(candidate.tainted)}")
    kl = candidate.manifest.get("metrics", {}).get("kl_ref")
    _bound(verdict, "kl_ref", kl, most=wanted.max_kl)
    _bound(verdict, "net_reward", candidate.net_reward, least=wanted.min_net_reward)
    if not verdict.failed:
        _ask(verdict, candidate, settings)
    return verdict


def conclude(connection: Connection, policy_id: int, version: int, attempts: int, verdict: Verdict) -> bool:
    """Record a verdict; promote the version if it passed and still may. Tell whether it was promoted."""
    pointers.hold(connection, policy_id)
    recorded = connection.execute(
        _CONCLUDE,
        {
            "policy": policy_id, "version": version, "attempts": attempts, "passed": not verdict.failed,
            "reason": "; ".join(verdict.failed)[:2000], "metrics": json.dumps(verdict.metrics),
        },
    ).one_or_none()  # fmt: skip
    named = {"policy": policy_id, "version": version}
    if recorded is None or verdict.failed or not connection.execute(_STILL_WANTED, named).scalar_one():
        return False
    pointers.promote(connection, policy_id, version, reason="gates passed")
    return True


def verdicts(connection: Connection, policy_id: int, *, limit: int) -> list[dict[str, Any]]:
    """Return what was said of the newest versions; `passed` null: being judged."""
    return [
        {
            "version": row.version, "passed": row.passed, "reason": row.reason, "metrics": row.metrics or {},
            "started_at": row.started_at.isoformat(),
            "finished_at": row.finished_at and row.finished_at.isoformat(),
        }
        for row in connection.execute(_VERDICTS, {"policy": policy_id, "limit": limit})
    ]  # fmt: skip


def _candidate(connection: Connection, policy_id: int, version: int) -> Candidate:
    row = connection.execute(_CANDIDATE, {"policy": policy_id, "version": version}).one()
    wanted = Promotion.model_validate(row.document["promotion"])
    return Candidate(
        row.policy, row.version, row.parent, row.promoted_version, row.manifest, row.tainted,
        row.net_reward, wanted,
    )  # fmt: skip


def _bound(
    verdict: Verdict, name: str, value: float | None, *, least: float | None = None, most: float | None = None
) -> None:
    """Judge one figure; a bound on a figure that is missing is not kept."""
    if value is not None:
        verdict.metrics[name] = value
    if least is None and most is None:
        return
    if value is None:
        verdict.failed.append(f"{name} is not known")
    elif (least is not None and not value >= least) or (most is not None and not value <= most):
        verdict.failed.append(f"{name} is {value:.4g}, the bound {least if least is not None else most:g}")


def _ask(verdict: Verdict, candidate: Candidate, settings: Settings) -> None:
    wanted = candidate.promotion
    document = {
        "policy": candidate.policy, "version": candidate.version, "parent": candidate.parent,
        "promoted_version": candidate.promoted_version, "manifest": candidate.manifest,
    }  # fmt: skip
    try:
        if wanted.hook_url is not None:
            _take(verdict, hooks.ask_url(
                wanted.hook_url, document, seconds=wanted.hook_timeout_seconds, hosts=settings.hook_hosts
            ))  # fmt: skip
        if wanted.hook_command is not None:
            command = _command(settings, wanted.hook_command)
            _take(verdict, hooks.run_command(command, document, seconds=wanted.hook_timeout_seconds))
    except HookFailed as error:
        verdict.failed.append(str(error))
    except (OSError, YoroError) as error:
        verdict.failed.append(f"the hook could not be asked: {error}")


def _command(settings: Settings, name: str) -> list[str]:
    if name not in settings.promotion_commands:
        raise HookFailed(f"this server has no promotion command {name!r}")
    return settings.promotion_commands[name]


def _take(verdict: Verdict, answer: Answer) -> None:
    verdict.metrics.update({f"hook/{name}": value for name, value in answer.metrics.items()})
    if not answer.passed:
        verdict.failed.append(f"the hook says no{f': {answer.reason}' if answer.reason else ''}")
