"""Deletes files of packages that services never read; run it in the environment after installing.

These are tests, headers and CMake files of torch, static libraries, and the bytecode of model
families in transformers; Python compiles the family in use again.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_OF_TORCH = ("test", "include", "share")
# torch requires it at import.
_PROGRAM = "torch_shm_manager"


def main() -> None:
    """Delete the files and print their total size."""
    packages = Path(sysconfig.get_path("purelib"))
    freed = sum(_delete(path) for path in list(superfluous(packages)))
    print(f"deleted {freed / 1e6:.0f} MB from {packages}")


def superfluous(packages: Path) -> Iterator[Path]:
    """Yield files and directories to delete, none inside another."""
    torch = packages / "torch"
    yield from (torch / name for name in _OF_TORCH if (torch / name).exists())
    yield from (path for path in torch.glob("bin/*") if path.name != _PROGRAM)
    yield from _outermost(path for path in packages.rglob("tests") if path.is_dir())
    yield from packages.rglob("*.a")
    models = packages / "transformers" / "models"
    yield from (path for path in models.glob("*/__pycache__") if path.parent.name != "auto")


def _outermost(directories: Iterator[Path]) -> Iterator[Path]:
    unique = set(directories)
    return (path for path in sorted(unique) if not unique & set(path.parents))


def _delete(path: Path) -> int:
    """Delete a file or directory and return its size in bytes."""
    if not path.is_dir():
        size = path.stat().st_size
        path.unlink()
        return size
    size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
    shutil.rmtree(path)
    return size


if __name__ == "__main__":
    main()
