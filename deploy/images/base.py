"""Builds a base image for machines that cannot pull the pinned one.

`python -m deploy.images.base`, as root, with debootstrap and buildah: Debian 12 with its Python
3.11 from Debian's mirror. For development only: published images use the pinned base.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "localhost/specrej/base:bookworm"
_PACKAGES = ("python3-minimal", "python3-venv", "python-is-python3", "ca-certificates")
_NOT_NEEDED = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man")


def main() -> None:
    """Bootstrap a root file system and commit it as an image."""
    # Several hundred MB: too large for a /tmp in memory.
    with tempfile.TemporaryDirectory(prefix="specrej-base-", dir="/var/tmp") as scratch:
        root = Path(scratch) / "root"
        root.mkdir(mode=0o755)
        packages = ",".join(_PACKAGES)
        _run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root))
        for directory in _NOT_NEEDED:
            _run("find", str(root / directory), "-mindepth", "1", "-delete")
        _commit(root)
    print(NAME)


def _commit(root: Path) -> None:
    container = _run("buildah", "from", "scratch")
    try:
        _run("buildah", "copy", "--quiet", container, str(root), "/")
        _run("buildah", "config", "--cmd", "python", "--env", "LANG=C.UTF-8", container)
        _run("buildah", "commit", "--quiet", container, NAME)
    finally:
        _run("buildah", "rm", container)


def _run(*command: str) -> str:
    """Return the stdout of a command; stderr is inherited."""
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(command)}: exit code {result.returncode}\n{result.stdout[-2000:]}")
    return result.stdout.strip()


if __name__ == "__main__":
    main()
