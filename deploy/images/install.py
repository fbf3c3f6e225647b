"""Installs the packages of an image by hash and lists them in a bill of materials.

`python install.py LOCK EXTRA...`, in the environment to install into, with pip and cyclonedx-py on
the path. Package names come from pyproject.toml (its dependencies and those extras), versions and
hashes from the lock: pip refuses a package without them. Packages that are installed already, such
as torch, are kept. Only wheels are used: no code of a package runs.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path


def main(lock: str, *extras: str) -> None:
    """Install and list the packages."""
    project = Path("pyproject.toml")
    pip = ("pip", "--python", sys.executable, "install", "--no-cache-dir", "--only-binary=:all:")
    locked = ("--require-hashes", f"--constraint={lock}")
    subprocess.run([*pip, *locked, *requirements(project, extras)], check=True)
    sbom = ("--output-reproducible", f"--pyproject={project}", f"-o={sys.prefix}/sbom.cdx.json")
    subprocess.run(["cyclonedx-py", "environment", *sbom, sys.executable], check=True)


def requirements(project: Path, extras: Iterable[str]) -> list[str]:
    """Return the project's dependencies and those of the extras."""
    declared = tomllib.loads(project.read_text())["project"]
    groups = (declared["optional-dependencies"][extra] for extra in extras)
    return [*declared["dependencies"], *(package for group in groups for package in group)]


if __name__ == "__main__":
    main(*sys.argv[1:])
