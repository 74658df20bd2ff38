"""Which ready rollouts a batch would take now: of different tasks, by age, never by reward.

Must run inside the caller's transaction. Fresh means: sampled from a version at most `max_staleness`
below the head. Ready rollouts are read depth by depth in the order of one index, so that a look reads
only as far as a batch's worth of tasks reaches, and nothing that is stale. Where fresh rollouts are of
fewer tasks than a batch holds, or those of the last tasks lie far back, it goes over all of them, once;
`overload.backlog_batches` bounds how many there can be.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, TextClause, text


def _ordered(direction: str, beyond: str) -> TextClause:
    """Return the statement of one page: rollouts of no task that is taken yet, beyond a point in time."""
    return text(f"""
SELECT c.id, c.task_key, c.ready_at
FROM unnest(CAST(:depths AS integer[])) AS fresh (depth)
CROSS JOIN LATERAL (
    SELECT id, task_key, ready_at FROM rollouts
    WHERE policy_id = :policy AND state = 'ready' AND depth = fresh.depth AND task_key <> ALL(:taken)
      AND (CAST(:at AS timestamptz) IS NULL OR (ready_at, id) {beyond} (:at, :id))
    ORDER BY ready_at {direction}, id {direction} LIMIT :limit) AS c
ORDER BY c.ready_at {direction}, c.id {direction} LIMIT :limit
""")  # noqa: S608 - our own words


_OLDEST, _NEWEST = _ordered("ASC", ">"), _ordered("DESC", "<")

_OLDEST_READY = text("""
SELECT min(c.ready_at) FROM unnest(CAST(:depths AS integer[])) AS fresh (depth)
CROSS JOIN LATERAL (
    SELECT ready_at FROM rollouts WHERE policy_id = :policy AND state = 'ready' AND depth = fresh.depth
    ORDER BY ready_at, id LIMIT 1) AS c
""")


def choose(
    connection: Connection, policy_id: int, depths: list[int], size: int, *, newest: bool = False
) -> tuple[list[int], datetime | None]:
    """Return one ready rollout of each of up to `size` tasks, oldest (or newest) first.

    With them comes the moment since when the oldest fresh rollout of all has been ready.
    """
    chosen: dict[str, int] = {}
    first: Any = None
    last: Any = None
    limit = 2 * size
    while len(chosen) < size and depths:
        rows = connection.execute(
            _NEWEST if newest else _OLDEST,
            {
                "policy": policy_id, "depths": depths, "taken": list(chosen), "limit": limit,
                "at": None if last is None else last.ready_at, "id": 0 if last is None else last.id,
            },
        ).all()  # fmt: skip
        first = first or (rows[0] if rows else None)
        for row in rows:
            if len(chosen) < size:
                chosen.setdefault(row.task_key, row.id)
        if len(rows) < limit:
            break
        last = rows[-1]
    oldest = _oldest_ready(connection, policy_id, depths) if newest else first and first.ready_at
    return list(chosen.values()), oldest


def _oldest_ready(connection: Connection, policy_id: int, depths: list[int]) -> datetime | None:
    found: datetime | None = connection.execute(
        _OLDEST_READY, {"policy": policy_id, "depths": depths}
    ).scalar_one()
    return found
