"""What a sweep ran on, and what it asked."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from specrej.contracts import ServiceDescription

_PACKAGES = ("torch", "transformers", "grpcio")


def describe_machine() -> dict[str, str]:
    """The client's: processor, cores, memory, versions of what is installed."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _version(name))},
    }


def describe_service(service: ServiceDescription) -> dict[str, str]:
    """The model, and what requests that name nothing get."""
    generator, schedule = service.generator, service.default_schedule
    decisions = {
        "memory": "where slots are full",
        "tokens": " ".join(map(str, schedule.tokens)),
        "geometric": f"{schedule.first}, then times {schedule.factor:g}",
    }
    return {
        "model": generator.model,
        "device": generator.device,
        "slots": str(generator.slots.capacity),
        "reward": service.rewards[0] if service.rewards else "likelihood",
        "decision tokens": decisions[schedule.kind],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
