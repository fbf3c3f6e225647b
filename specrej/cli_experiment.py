"""`specrej experiment`: hands over to the experiments, which this package does not know."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import typer

from specrej.cli_run import note


def experiment(context: typer.Context) -> None:
    """Reproduce the paper on your models; find the best settings (--help says more)."""
    # In a process of its own: it may hold models.
    if importlib.util.find_spec("experiments") is None:
        note("specrej: the experiments are not installed: run it where they are, in the repository")
        raise typer.Exit(1)
    command = [sys.executable, "-m", "experiments", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
