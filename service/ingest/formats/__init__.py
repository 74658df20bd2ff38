"""Dialects: one module each, from bytes to the normalised document (design/api.md)."""
