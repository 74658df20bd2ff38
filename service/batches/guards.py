"""What stops or slows training by itself, with the reason stored: no bad state goes on for good.

    sampler KL above a bound, steps in a row    halve the learning rate; above a higher one, pause
    batches in a row that lost poison           pause
    the newest versions earn far less           pause, and go back to the last good version (collapse.py)

`act` runs in a transaction of its own, after the locks of the lineage. Invariants: a policy that somebody
paused is left alone; every act raises an alert and says in words what was seen; what led to an act does
not lead to it again after `resume` (`guards_from_batch`; versions that a collapse rewound away are no
longer in view).
"""

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, text

from service.batches import collapse
from service.batches.locks import hold_lineage
from service.batches.outlook import Outlook
from service.batches.pauses import pause, raise_alerts
from service.batches.rewind import rewind
from service.database import policies
from service.policies import Guards

HALVINGS = 3
"""In a row, with nobody changing the settings between; then the rate is not what is wrong: pause."""
HALVED = "learning_rate_halved"
_ADVICE = "do trainer and samplers agree about template, dtype and temperature, and load each version?"

_PRESENT = text("""
SELECT p.paused, p.settings_revision, l.head_version, l.next_batch
FROM policies p JOIN lineages l ON l.policy_id = p.id WHERE p.id = :policy
""")

# Steps of the settings in force only: a rate that was halved a batch ago has not acted yet.
_KL = text("""
SELECT (b.metrics ->> 'kl_sample_train_v2')::float8 AS kl FROM batches b
JOIN policies p ON p.id = b.policy_id AND b.settings_revision = p.settings_revision
JOIN policy_versions v ON v.batch_id = b.id AND NOT v.rewound
WHERE b.policy_id = :policy AND b.state = 'trained' AND b.number >= p.guards_from_batch
ORDER BY b.number DESC LIMIT :steps
""")

_HALVINGS = text("""
SELECT count(*) FROM settings_revisions WHERE policy_id = :policy AND revision > (
    SELECT max(revision) FROM settings_revisions WHERE policy_id = :policy AND reason = '')
""")

_BAD_BATCHES = text("""
SELECT count(*) = :count AND bool_and(bad) FROM (
    SELECT EXISTS (SELECT FROM batch_members m WHERE m.batch_id = b.id AND m.reason LIKE 'poison:%') AS bad
    FROM batches b JOIN policies p ON p.id = b.policy_id
    WHERE b.policy_id = :policy AND b.state IN ('trained', 'no_step') AND b.number >= p.guards_from_batch
    ORDER BY b.number DESC LIMIT :count) AS last
""")

# Clean versions of the branch that can be loaded, the newest first.
_GOOD = text("""
SELECT g.version FROM policy_versions g JOIN policy_versions v ON v.policy_id = g.policy_id
WHERE g.policy_id = :policy AND v.version = :version AND g.depth <= v.depth
  AND NOT g.rewound AND g.files_removed_at IS NULL AND g.tainted = '{}'
ORDER BY g.depth DESC LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Act:
    """What a guard did, and why. Example: guard "collapsed", deed "returned"."""

    guard: str
    deed: Literal["halved", "paused", "returned"]
    reason: str


def needed_rollouts(connection: Connection, view: Outlook) -> list[int]:
    """Return the rollouts whose embeddings `act` would need; none unless rewards look like a collapse."""
    guards = view.settings.guards
    drop = collapse.suspect(connection, view.policy_id, guards) if guards.collapse != "off" else None
    if drop is None:
        return []
    good, new = collapse.rollouts(connection, view.policy_id, drop)
    return [*good, *new]


def act(connection: Connection, view: Outlook, encoder: str) -> Act | None:
    """Do the first thing that is due; None when nothing is, or when the policy has moved on.

    Raises VectorMissing when a rollout came to `needed_rollouts` meanwhile: look again.
    """
    hold_lineage(connection, view.policy_id)
    present = connection.execute(_PRESENT, {"policy": view.policy_id}).one()
    moved = (present.settings_revision, present.head_version, present.next_batch)
    if present.paused or moved != (view.revision, view.head_version, view.next_batch):
        return None
    return (
        _on_divergence(connection, view)
        or _on_bad_batches(connection, view)
        or _on_collapse(connection, view, encoder)
    )


def _on_divergence(connection: Connection, view: Outlook) -> Act | None:
    guards = view.settings.guards
    rows = connection.execute(_KL, {"policy": view.policy_id, "steps": guards.kl_steps})
    kls = [kl for kl in rows.scalars() if kl is not None]
    if len(kls) < guards.kl_steps:
        return None
    least = min(kls)
    seen = f"the last {len(kls)} steps diverged from the sampler by {least:.3g} or more (kl_sample_train_v2)"
    if guards.pause_above_kl is not None and least > guards.pause_above_kl:
        return _paused(connection, view, "sampler_kl", f"{seen}; {_ADVICE}")
    if guards.halve_rate_above_kl is None or least <= guards.halve_rate_above_kl:
        return None
    if connection.execute(_HALVINGS, {"policy": view.policy_id}).scalar_one() >= HALVINGS:
        told = f"though the learning rate was halved {HALVINGS} times, {seen}; {_ADVICE}"
        return _paused(connection, view, "sampler_kl", told)
    return _halve(connection, view, seen)


def _halve(connection: Connection, view: Outlook, seen: str) -> Act:
    rate = view.settings.optimizer.learning_rate / 2
    reason = f"optimizer.learning_rate was halved to {rate:.3g}: {seen}"
    policies.revise(connection, view.policy_id, {"optimizer": {"learning_rate": rate}}, reason=reason)
    raise_alerts(connection, view.policy_id, [HALVED], [reason])
    return Act("sampler_kl", "halved", reason)


def _on_bad_batches(connection: Connection, view: Outlook) -> Act | None:
    count = view.settings.guards.bad_batches
    if count is None:
        return None
    named = {"policy": view.policy_id, "count": count}
    if not connection.execute(_BAD_BATCHES, named).scalar_one():
        return None
    reason = f"the last {count} batches each lost rollouts that cannot be trained (excluded as poison)"
    return _paused(connection, view, "bad_batches", reason)


def _on_collapse(connection: Connection, view: Outlook, encoder: str) -> Act | None:
    guards = view.settings.guards
    drop = collapse.suspect(connection, view.policy_id, guards) if guards.collapse != "off" else None
    if drop is not None:
        drop = collapse.confirm(connection, view.policy_id, guards, drop, encoder)
    return None if drop is None else _return(connection, view, guards, str(drop), drop.good)


def _return(connection: Connection, view: Outlook, guards: Guards, seen: str, version: int) -> Act:
    """Pause, and where that is wanted and possible put the head back."""
    named = {"policy": view.policy_id, "version": version}
    good: Any = connection.execute(_GOOD, named).scalar_one_or_none()
    if guards.collapse == "pause" or good is None:
        none_left = "" if good is not None else "; no clean version before them has its files"
        return _paused(connection, view, "collapsed", f"{seen}{none_left}")
    rewind(connection, view.policy_id, good, reason="guard: collapsed", keep_hold=True)
    reason = (
        f"{seen}: training went back to version {good}; before `resume`, lower optimizer.learning_rate or "
        "see what changed in tasks and graders"
    )
    pause(connection, view.policy_id, "collapsed", reason, seen=False)
    return Act("collapsed", "returned", reason)


def _paused(connection: Connection, view: Outlook, code: str, reason: str) -> Act:
    pause(connection, view.policy_id, code, reason)
    return Act(code, "paused", reason)
