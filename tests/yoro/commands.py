"""Run a verb of `yoro` in this process."""

from typer.testing import CliRunner, Result

from yoro.cli import app


def run(*arguments: str) -> Result:
    """Run it on a wide terminal."""
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, list(arguments))
