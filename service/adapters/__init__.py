"""The adapter registry and its store of immutable files."""
