"""The `yoro` command: one module a group of verbs; heavy imports wait until a verb needs them."""

import sys

import httpx
import typer
from rich.console import Console

from yoro.cli import (
    adapters,
    baselines,
    calibration_sets,
    consume,
    dead_letters,
    demo,
    keys,
    policies,
    processes,
    retention,
    serve_sync,
    status,
)
from yoro.client import ApiError
from yoro.pull import PullError

app = typer.Typer(
    name="yoro",
    help="Train a LoRA adapter from single production traces: you only rollout once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(policies.app, name="policy")
app.add_typer(keys.app, name="keys")
app.add_typer(calibration_sets.app, name="calibration-set")
app.add_typer(dead_letters.app, name="dead-letter")
for module in (processes, consume, status, adapters, baselines, retention, demo, serve_sync):
    module.register(app)


def main() -> None:
    """Run the command; errors that a user can mend are one line, not a traceback."""
    try:
        app()
    except (ApiError, PullError, OSError) as error:
        _fail(str(error))
    except httpx.TransportError as error:
        _fail(f"The API does not answer ({error}). Is `yoro up` running? --url and --data say where.")
    except Exception as error:
        # Known by its shape: importing the service's errors here would load the service for `--help`.
        if not hasattr(error, "detail"):
            raise
        _fail(_readable(error))


def _readable(error: Exception) -> str:
    fields = [f"  {field.pointer}: {field.message}" for field in getattr(error, "errors", ())]
    return "\n".join([str(getattr(error, "detail", error)), *fields])


def _fail(message: str) -> None:
    Console(stderr=True, highlight=False).print(f"yoro: {message}", style="red", markup=False)
    sys.exit(1)
