"""Installs the packages of an image by hash and lists them in a bill of materials.

`python install.py LOCK EXTRA...`, in the environment to install into, with pip and cyclonedx-py on
the path. Names are the dependencies of both pyproject.toml and those extras of the second, versions
and hashes are the lock's. Only wheels are used: no code of a package runs.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path


def main(lock: str, *extras: str) -> None:
    """Install and list the packages."""
    root = Path()
    pip = ("pip", "--python", sys.executable, "install", "--no-cache-dir", "--only-binary=:all:")
    locked = ("--require-hashes", f"--constraint={lock}")
    subprocess.run([*pip, *locked, *requirements(root, extras)], check=True)
    sbom = (
        "--output-reproducible",
        f"--pyproject={root / 'pyproject.toml'}",
        f"-o={sys.prefix}/sbom.cdx.json",
    )
    subprocess.run(["cyclonedx-py", "environment", *sbom, sys.executable], check=True)


def requirements(root: Path, extras: Iterable[str]) -> list[str]:
    """Return the dependencies of client and services and those of the services' extras."""
    client, server = (
        tomllib.loads((root / folder / "pyproject.toml").read_text()) for folder in ("", "server")
    )
    declared = [
        *client["project"]["dependencies"],
        *server["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"],
        *(name for extra in extras for name in server["project"]["optional-dependencies"][extra]),
    ]
    return [name for name in declared if not name.startswith("specrej")]


if __name__ == "__main__":
    main(*sys.argv[1:])
