"""What users touch: the `yoro` command and the clients."""

from yoro.async_client import AsyncClient
from yoro.client import ApiError, Client

__all__ = ["ApiError", "AsyncClient", "Client"]
