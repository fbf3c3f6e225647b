"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers


def describe_machine() -> dict[str, str | int]:
    """Processor, cores and versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
