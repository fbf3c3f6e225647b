"""The machine that a result was measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "transformers", "grpcio")


def describe_machine() -> dict[str, str | int]:
    """Processor, available cores, memory, and versions of Python and the installed packages."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _version(name))},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
