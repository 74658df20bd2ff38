"""More ready rollouts than batches will take: what is left out becomes `not_sampled`.

Must run inside the caller's transaction, under the policy's assembly lock, so that two schedulers do
not both leave out the same number. Invariant: the choice depends on age or on a hash of the trace's
id, never on the reward.
"""

from sqlalchemy import Connection, TextClause, text

from service.policies import PolicySettings

BATCH = 10_000


def _leaving_out(order: str) -> TextClause:
    return text(f"""
WITH excess AS (
    SELECT id FROM rollouts WHERE policy_id = :policy AND state = 'ready' AND depth = ANY(:depths)
    ORDER BY {order} LIMIT :excess FOR UPDATE SKIP LOCKED
)
UPDATE rollouts r SET state = 'excluded', reason = 'not_sampled', ready_at = NULL
FROM excess WHERE r.id = excess.id
""")  # noqa: S608 - our own words


_LEAVE_OUT = {
    "oldest": _leaving_out("ready_at DESC, id DESC"),
    "newest": _leaving_out("ready_at, id"),
    "sample": _leaving_out("hashtextextended(trace_id, policy_id) DESC, id"),
}


def is_too_much(settings: PolicySettings, fresh: int) -> bool:
    """Tell whether some of `fresh` ready rollouts must be left out."""
    return _excess(settings, fresh) > 0


def leave_out(
    connection: Connection, policy_id: int, settings: PolicySettings, depths: list[int], fresh: int
) -> int:
    """Exclude the excess of `fresh` ready rollouts over the backlog; return how many at most."""
    excess = min(BATCH, _excess(settings, fresh))
    if excess > 0:
        statement = _LEAVE_OUT[settings.batching.overload.take]
        connection.execute(statement, {"policy": policy_id, "depths": depths, "excess": excess})
    return max(excess, 0)


def _excess(settings: PolicySettings, fresh: int) -> int:
    batches = settings.batching.overload.backlog_batches
    return 0 if batches is None else fresh - batches * settings.batching.size
