"""What users touch: the `yoro` command and the Client."""

from yoro.client import ApiError, Client

__all__ = ["ApiError", "Client"]
