"""Advisory locks of this package, held until the transaction ends.

Order of locks wherever several are taken: assembly, then the lineage row, then rollouts. A process
that dies loses its connection and with it every lock.
"""

from sqlalchemy import Connection, text

ASSEMBLY = 0x6261_7463  # "batc": apart from other advisory locks of the database
COUNTS = 0x636F_756E  # "coun"
ALERTS = 0x616C_6572  # "aler"

_TRY = text("SELECT pg_try_advisory_xact_lock(:space, :policy)")
_WAIT = text("SELECT pg_advisory_xact_lock(:space, :policy)")
_LINEAGE = text("SELECT policy_id FROM lineages WHERE policy_id = :policy FOR UPDATE")


def try_lock(connection: Connection, space: int, policy_id: int) -> bool:
    """Take the lock unless somebody has it; tell whether it was taken."""
    taken: bool = connection.execute(_TRY, {"space": space, "policy": policy_id}).scalar_one()
    return taken


def hold_lineage(connection: Connection, policy_id: int) -> None:
    """Wait until nobody assembles or commits for this policy; from here on its batches stand still."""
    connection.execute(_WAIT, {"space": ASSEMBLY, "policy": policy_id})
    connection.execute(_LINEAGE, {"policy": policy_id})
