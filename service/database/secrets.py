"""Keys of this installation, made at the first migration."""

from sqlalchemy import Engine, text

from service.database.engine import transaction

_FINGERPRINT = text("SELECT value FROM secrets WHERE name = 'fingerprint'")


def fingerprint_key(engine: Engine) -> bytes:
    """Return the key under which documents are fingerprinted: the same for every door."""
    with transaction(engine) as connection:
        return bytes(connection.execute(_FINGERPRINT).scalar_one())
