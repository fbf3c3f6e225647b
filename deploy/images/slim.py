"""Drops what packages bring and a service never reads: run in the environment, after installing.

Tests, headers and CMake files of torch, static libraries, and the compiled form of the one or two
hundred model families that a service does not serve; Python compiles the one it does serve.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_OF_TORCH = ("test", "include", "share")
# torch looks for it when it is imported.
_PROGRAM = "torch_shm_manager"


def main() -> None:
    """Drop it, and say how much that was."""
    packages = Path(sysconfig.get_path("purelib"))
    freed = sum(_drop(each) for each in list(superfluous(packages)))
    print(f"dropped {freed / 1e6:.0f} MB from {packages}")


def superfluous(packages: Path) -> Iterator[Path]:
    """Files and directories, none inside another."""
    torch = packages / "torch"
    yield from (torch / each for each in _OF_TORCH if (torch / each).exists())
    yield from (each for each in torch.glob("bin/*") if each.name != _PROGRAM)
    yield from _outermost(each for each in packages.rglob("tests") if each.is_dir())
    yield from packages.rglob("*.a")
    models = packages / "transformers" / "models"
    yield from (each for each in models.glob("*/__pycache__") if each.parent.name != "auto")


def _outermost(directories: Iterator[Path]) -> Iterator[Path]:
    found = set(directories)
    return (each for each in sorted(found) if not found & set(each.parents))


def _drop(path: Path) -> int:
    """The bytes that it had."""
    if not path.is_dir():
        size = path.stat().st_size
        path.unlink()
        return size
    size = sum(each.lstat().st_size for each in path.rglob("*") if each.is_file())
    shutil.rmtree(path)
    return size


if __name__ == "__main__":
    main()
