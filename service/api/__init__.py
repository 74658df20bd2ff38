"""The HTTP edge: one route module a noun."""
