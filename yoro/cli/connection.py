"""How verbs find the API, and the folder of a `yoro up` on this machine: options, environment, defaults."""

from pathlib import Path
from typing import Annotated

import typer

from yoro.client import Client

Url = Annotated[str, typer.Option("--url", envvar="YORO_URL", help="Where the API answers.")]
Key = Annotated[str, typer.Option("--key", envvar="YORO_API_KEY", help="API key; else DATA/admin.key.")]
Data = Annotated[Path, typer.Option("--data", envvar="YORO_DATA", help="Folder of a local `yoro up`.")]

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_DATA = Path("yoro-data")


def connect(url: str, key: str, data: Path) -> Client:
    """Return a client with the key given, or that of the local installation."""
    file = data / "admin.key"
    if not key and file.exists():
        key = file.read_text().strip()
    return Client(url, key)
