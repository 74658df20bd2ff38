"""The gradient: from a batch to the next adapter version."""
