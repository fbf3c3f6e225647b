"""The machine that a result was measured on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = {"torch": "torch", "transformers": "transformers", "grpcio": "grpc"}


def describe_machine() -> dict[str, str | int]:
    """Processor, available cores, memory, and versions of Python and the installed packages."""
    processor = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor[1] if processor else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "python": platform.python_version(),
        **{name: version(name) for name, module in _PACKAGES.items() if find_spec(module)},
    }
