"""Logged rollouts of tasks that recur, as lines of a calibration set (baselines/calibration_sets.py).

Reads only; must run inside the caller's transaction. Invariants: every line holds rewards of one
policy, by the rule that its settings state now, from the versions asked for; a re-delivery of an attempt
is no second attempt; what was erased is not there and what was masked stays masked, since the prompt is
read from the stored document; memory does not grow with the number of tasks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from service.baselines.calibration_sets import calibration_line
from service.database.documents import read_document
from service.errors import NotFound
from service.ingest.formats.native import first_action

PAGE = 100
"""Documents held at once."""

_POLICY = text("SELECT id FROM policies WHERE name = :name")

# A rollout that has been trained keeps the reward of the rule that it was trained under.
_REWARDED = """
rewarded AS (
    SELECT r.id, r.task_key, r.reward, r.version,
           made.document -> 'reward' = present.document -> 'reward' AS counts
    FROM rollouts r
    JOIN policies p ON p.id = r.policy_id
    JOIN settings_revisions present ON present.policy_id = p.id AND present.revision = p.settings_revision
    JOIN settings_revisions made ON made.policy_id = p.id AND made.revision = r.reward_revision
    WHERE r.policy_id = :policy AND r.reward IS NOT NULL AND r.arrival IS NOT NULL AND r.erased_at IS NULL
      AND (CAST(:oldest AS integer) IS NULL OR r.version >= :oldest)
      AND (CAST(:newest AS integer) IS NULL OR r.version <= :newest)
)
"""

_TASKS = text(f"""
WITH {_REWARDED}, attempts AS (
    SELECT DISTINCT ON (w.task_key, f.content_digest) w.*
    FROM rewarded w JOIN rollout_features f ON f.rollout_id = w.id
    WHERE w.counts ORDER BY w.task_key, f.content_digest, w.id
), tasks AS (
    SELECT task_key, min(id) AS first, array_agg(reward ORDER BY id) AS rewards,
           min(version) AS oldest, max(version) AS newest
    FROM attempts GROUP BY task_key HAVING count(*) >= :least
)
SELECT t.*, d.normalised FROM tasks t JOIN rollout_documents d ON d.rollout_id = t.first ORDER BY t.first
""")  # noqa: S608 - our own expressions

_OUTDATED = text(f"WITH {_REWARDED} SELECT count(*) FROM rewarded WHERE NOT counts")  # noqa: S608


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rollouts count. Example: `Wanted("support", oldest=4, newest=12)`."""

    policy: str
    oldest: int | None = None
    newest: int | None = None
    """First and last version that sampled them; null: no bound. With a bound, a version must be known."""
    least: int = 2
    """Rewards below which a task is left out."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One task's line, and what it was made of."""

    line: str
    rewards: int
    oldest: int | None
    newest: int | None
    """Versions that its rollouts were sampled from; null: none of them named one."""


def export(connection: Connection, wanted: Wanted) -> Iterator[Exported]:
    """Yield the tasks that recur, in the order of their first rollout. Raises NotFound."""
    given = {**_bounds(connection, wanted), "least": wanted.least}
    for row in connection.execute(_TASKS, given, execution_options={"yield_per": PAGE}):
        line = _line(row.task_key, read_document(row.normalised), row.rewards)
        yield Exported(line, len(row.rewards), row.oldest, row.newest)


def outdated(connection: Connection, wanted: Wanted) -> int:
    """Count the rollouts left out because an earlier reward rule made their reward."""
    count: int = connection.execute(_OUTDATED, _bounds(connection, wanted)).scalar_one()
    return count


def _bounds(connection: Connection, wanted: Wanted) -> dict[str, Any]:
    policy = connection.execute(_POLICY, {"name": wanted.policy}).scalar_one_or_none()
    if policy is None:
        raise NotFound(f"There is no policy {wanted.policy!r}", code="policy_not_found")
    return {"policy": policy, "oldest": wanted.oldest, "newest": wanted.newest}


def _line(task_key: str, document: Mapping[str, Any], rewards: list[float]) -> str:
    """Cut the document before its first action, as its features were made."""
    messages = document["messages"][: first_action(document)]
    return calibration_line(
        task_key, messages, document.get("tools", []), document.get("context", {}), rewards
    )
