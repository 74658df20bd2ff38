"""Things a person should look at, found from what status looks at anyway; raised once, cleared when over.

Must run inside the caller's transaction. Invariant: a check costs a few index probes, whatever the
number of rollouts, dead letters or partitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, text

from service.batches.locks import ALERTS, try_lock
from service.batches.outlook import Outlook
from service.batches.pauses import raise_alerts
from service.database.tables import ROLLOUT_STATES

NEWEST_TRACES = 20
"""How many of the newest traces must all come from an old version."""
OLD_AFTER = timedelta(minutes=10)
"""How long a version must have been promoted before traces of older ones are suspicious."""
SILENT_BATCHES = 3
"""Batches in a row without any signal."""
SILENT_GRADER = timedelta(hours=1)
KNOWN_GRADER = 20
"""Grades after which a grader counts as a regular one."""
SPEAKS_ONCE = "calibration"
"""The grader of `yoro calibration-set import`, which is not expected to go on."""
ABSENT_TRAINER = timedelta(minutes=1)
OPEN_LETTERS = timedelta(days=1)
"""How long a dead letter that nobody replays is worth an alert."""
COUNTED_LETTERS = 1000
SILENT_CONSUMER = timedelta(minutes=1)
"""How long a partition may be without a word from whoever consumes it; they speak every five seconds."""

_NEWEST = text("""
SELECT n.version, n.depth, n.received_at
FROM unnest(CAST(:states AS text[])) AS every (state)
CROSS JOIN LATERAL (
    SELECT version, depth, received_at, id FROM rollouts r
    WHERE r.policy_id = :policy AND r.state = every.state
    ORDER BY r.received_at DESC, r.id DESC LIMIT :limit) AS n
ORDER BY n.received_at DESC, n.id DESC LIMIT :limit
""")

_CHAIN = text("""
SELECT (SELECT min(created_at) FROM batches WHERE policy_id = :policy AND state = 'ready') AS ready_since,
       coalesce(l.expires_at > clock_timestamp(), false) AS trainer_present,
       v.depth AS promoted_depth, v.created_at AS promoted_since,
       ARRAY(SELECT outcome FROM batches WHERE policy_id = :policy AND state IN ('trained', 'no_step')
             ORDER BY number DESC LIMIT :limit) AS outcomes
FROM lineages l JOIN policy_versions v ON v.policy_id = l.policy_id AND v.version = l.promoted_version
WHERE l.policy_id = :policy
""")

_REVISION = text("""
SELECT s.reason FROM policies p
JOIN settings_revisions s ON s.policy_id = p.id AND s.revision = p.settings_revision WHERE p.id = :policy
""")

# A letter that names no policy of its topic concerns whoever looks.
_KAFKA = text("""
SELECT (SELECT count(*) FROM (
            SELECT FROM dead_letters WHERE replayed_at IS NULL AND policy_id = :policy
                AND created_at > clock_timestamp() - CAST(:open AS interval) LIMIT :counted) AS own)
     + (SELECT count(*) FROM (
            SELECT FROM dead_letters WHERE replayed_at IS NULL AND policy_id IS NULL
                AND created_at > clock_timestamp() - CAST(:open AS interval) LIMIT :counted) AS of_nobody)
       AS letters,
       count(*) FILTER (WHERE l.reported_at < clock_timestamp() - CAST(:silent AS interval)) AS silent,
       count(*) FILTER (WHERE l.oldest_at < clock_timestamp() - make_interval(secs => l.limit_seconds))
           AS behind,
       extract(epoch FROM clock_timestamp() - min(l.oldest_at))::float8 AS oldest_seconds
FROM consumer_lags l
""")

_CLEAR = text("""
UPDATE alerts SET cleared_at = clock_timestamp()
WHERE policy_id = :policy AND cleared_at IS NULL AND code <> ALL(:codes)
""")


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to look at. Example: code "trainer_absent", detail "batch 7 has waited for 95 s"."""

    code: str
    detail: str


def find(connection: Connection, view: Outlook) -> list[Alert]:
    """Return what is wrong now, most telling first."""
    newest = connection.execute(
        _NEWEST, {"policy": view.policy_id, "states": list(ROLLOUT_STATES), "limit": NEWEST_TRACES}
    ).all()
    chain = connection.execute(_CHAIN, {"policy": view.policy_id, "limit": SILENT_BATCHES}).one()
    changed: str = connection.execute(_REVISION, {"policy": view.policy_id}).scalar_one()
    found = [
        # what guards did, until somebody resumes or changes the settings
        Alert(view.paused_code, view.paused_reason) if view.paused_code else None,
        Alert("learning_rate_halved", changed) if changed else None,
        _trainer_absent(view, chain),
        _sampler_version_stuck(view, chain, newest),
        _no_signal_batches(chain.outcomes),
        _grader_silent(view, newest),
        *_kafka(connection, view),
    ]
    return [alert for alert in found if alert is not None]


def keep(connection: Connection, view: Outlook, found: Sequence[Alert]) -> None:
    """Raise what is new, clear what is over; no-op while another scheduler does."""
    if not try_lock(connection, ALERTS, view.policy_id):
        return
    codes = [alert.code for alert in found]
    connection.execute(_CLEAR, {"policy": view.policy_id, "codes": codes})
    if found:
        raise_alerts(connection, view.policy_id, codes, [alert.detail for alert in found])


def _trainer_absent(view: Outlook, chain: Any) -> Alert | None:
    if chain.ready_since is None or chain.trainer_present or view.paused:
        return None
    waited: timedelta = view.now - chain.ready_since
    if waited < ABSENT_TRAINER:
        return None
    return Alert("trainer_absent", f"a batch has waited for a trainer for {waited.total_seconds():.0f} s")


def _sampler_version_stuck(view: Outlook, chain: Any, newest: Sequence[Any]) -> Alert | None:
    depths = [row.depth for row in newest if row.depth is not None]
    fresh_enough = newest and newest[-1].received_at > chain.promoted_since + OLD_AFTER
    if len(depths) < NEWEST_TRACES or not fresh_enough or max(depths) >= chain.promoted_depth:
        return None
    version = max(row.version for row in newest)
    return Alert(
        "sampler_version_stuck",
        f"the last {NEWEST_TRACES} traces come from version {version} or older, though version "
        f"{view.promoted_version} is promoted: do the samplers load it?",
    )


def _kafka(connection: Connection, view: Outlook) -> list[Alert]:
    asked = {
        "policy": view.policy_id, "open": OPEN_LETTERS, "counted": COUNTED_LETTERS, "silent": SILENT_CONSUMER,
    }  # fmt: skip
    row = connection.execute(_KAFKA, asked).one()
    found = []
    if row.letters:
        count = f"{row.letters}" if row.letters < COUNTED_LETTERS else f"{COUNTED_LETTERS} or more"
        found.append(
            Alert(
                "dead_letters",
                f"{count} Kafka messages of the last day could not be taken: see `yoro dead-letter list`",
            )
        )
    if row.silent:
        found.append(
            Alert("consumer_lag", f"nobody consumes {row.silent} partitions: does `yoro consume` run?")
        )
    elif row.behind:
        found.append(
            Alert(
                "consumer_lag",
                f"{row.behind} partitions are behind, the oldest message is {row.oldest_seconds:.0f} s old",
            )
        )
    return found


def _no_signal_batches(outcomes: Sequence[str]) -> Alert | None:
    if len(outcomes) < SILENT_BATCHES or not all(outcomes):
        return None
    return Alert(
        "no_signal_batches",
        f"the last {SILENT_BATCHES} batches made no step ({', '.join(dict.fromkeys(outcomes))}): "
        "do the graders tell good from bad?",
    )


def _grader_silent(view: Outlook, newest: Sequence[Any]) -> Alert | None:
    if not newest or not any(count.state == "waiting_reward" for count in view.counted):
        return None
    wanted = {*view.settings.reward.require, *view.settings.reward.weights}
    silent = sorted(
        count.reason
        for count in view.counted
        if count.state == "grader"
        and (count.reason in wanted or (count.amount >= KNOWN_GRADER and count.reason != SPEAKS_ONCE))
        and count.last_at is not None
        and newest[0].received_at - count.last_at > SILENT_GRADER
    )
    if not silent:
        return None
    return Alert(
        "grader_silent", f"traces keep coming, but nothing for over an hour from {', '.join(silent)}"
    )
