"""Postgres: tables, transactions, and the embedded server."""
