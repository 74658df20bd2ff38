"""Alembic migrations, one change a file."""
