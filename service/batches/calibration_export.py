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
from service.baselines.features import first_action
from service.database.documents import read_document
from service.errors import NotFound
from service.policies import PolicySettings

PAGE = 100
"""Documents held at once."""

_POLICY = text("SELECT id, settings_revision FROM policies WHERE name = :name")
_REVISIONS = text("SELECT revision, document FROM settings_revisions WHERE policy_id = :policy")

_REWARDED = """
r.policy_id = :policy AND r.reward IS NOT NULL AND r.arrival IS NOT NULL AND r.erased_at IS NULL
AND (CAST(:oldest AS integer) IS NULL OR r.version >= :oldest)
AND (CAST(:newest AS integer) IS NULL OR r.version <= :newest)
"""

_TASKS = text(f"""
WITH attempts AS (
    SELECT DISTINCT ON (r.task_key, f.content_digest) r.task_key, r.id, r.reward, r.version
    FROM rollouts r JOIN rollout_features f ON f.rollout_id = r.id
    WHERE {_REWARDED} AND r.reward_revision = ANY(:revisions)
    ORDER BY r.task_key, f.content_digest, r.id
), tasks AS (
    SELECT task_key, min(id) AS first, array_agg(reward ORDER BY id) AS rewards,
           min(version) AS oldest, max(version) AS newest
    FROM attempts GROUP BY task_key HAVING count(*) >= :least
)
SELECT t.*, d.normalised FROM tasks t JOIN rollout_documents d ON d.rollout_id = t.first ORDER BY t.first
""")  # noqa: S608 - our own words

_OUTDATED = text(f"""
SELECT count(*) FROM rollouts r WHERE {_REWARDED} AND r.reward_revision <> ALL(:revisions)
""")  # noqa: S608 - our own words


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
    policy = connection.execute(_POLICY, {"name": wanted.policy}).one_or_none()
    if policy is None:
        raise NotFound(f"There is no policy {wanted.policy!r}", code="policy_not_found")
    documents = connection.execute(_REVISIONS, {"policy": policy.id}).all()
    # Compared with defaults filled in: a part that an older release did not know is no change.
    rules = {row.revision: PolicySettings.model_validate(row.document).reward for row in documents}
    return {
        "policy": policy.id, "oldest": wanted.oldest, "newest": wanted.newest,
        # a rollout that has been trained keeps the reward of the rule that it was trained under
        "revisions": [number for number, rule in rules.items() if rule == rules[policy.settings_revision]],
    }  # fmt: skip


def _line(task_key: str, document: Mapping[str, Any], rewards: list[float]) -> str:
    """Cut the document before its first action, as its features were made; the id is as it was sent."""
    messages = document["messages"][: first_action(document)]
    return calibration_line(
        task_key.removeprefix("id:"),
        messages,
        document.get("tools", []),
        document.get("context", {}),
        rewards,
    )
