"""Installs the packages of an image and fails if requirements.lock does not pin one of them.

`python install.py EXTRA...`, in the environment to install into, with pip on the path. Package
names come from pyproject.toml (its dependencies and those extras), versions from requirements.lock.
With --gpu, the CUDA build of torch adds packages whose versions torch pins itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

# torch pins these itself; the lock has the versions of the CPU build.
_OF_CUDA = re.compile(r"^(nvidia|cuda|triton)\b")
_NOT_LOCKED = ("pip", "specrej")


def main(arguments: list[str]) -> None:
    """Install the packages, then check their versions."""
    gpu, extras = "--gpu" in arguments, [extra for extra in arguments if extra != "--gpu"]
    lock = Path("requirements.lock").read_text()
    pins = [line for line in lock.splitlines() if not (gpu and _OF_CUDA.match(line))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        _pip("--constraint", constraints.name, *requirements(Path("pyproject.toml"), extras))
    if loose := sorted(unpinned(pins, gpu)):
        raise SystemExit(f"not pinned by requirements.lock: {', '.join(loose)}")


def requirements(project: Path, extras: list[str]) -> list[str]:
    """Return the project's dependencies and those of the extras."""
    declared = tomllib.loads(project.read_text())["project"]
    groups = (declared["optional-dependencies"][extra] for extra in extras)
    return [*declared["dependencies"], *(package for group in groups for package in group)]


def unpinned(pins: list[str], gpu: bool) -> Iterator[str]:
    """Yield installed packages without a pin or in another version than the pinned one."""
    pinned = {_name(line): _version(line) for line in pins if "==" in line}
    for installed in distributions():
        name, version = _name(installed.metadata["Name"]), installed.version.partition("+")[0]
        exempt = name in _NOT_LOCKED or (gpu and _OF_CUDA.match(name))
        if not exempt and pinned.get(name) != version:
            yield f"{name} {installed.version}"


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=;\s]", requirement)[0]).lower()


def _version(pin: str) -> str:
    return re.split(r"[;\s]", pin.partition("==")[2])[0]


def _pip(*arguments: str) -> None:
    command = ["pip", "--python", sys.executable, "install", "--no-cache-dir", *arguments]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
