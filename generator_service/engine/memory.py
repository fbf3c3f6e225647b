"""How much memory is left for KV slots: a fraction of the total, less weights and workspace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes: of the machine, of those the generator's, and of its weights and workspace."""

    total: int
    allowed: int
    weights: int
    workspace: int

    @property
    def kv_bytes(self) -> int:
        return max(0, self.allowed - self.weights - self.workspace)


def budget(device: torch.device, fraction: float, weights: int, workspace: int) -> Budget:
    """The memory of a device once the weights are loaded.

    `allowed` is at most the free memory plus the weights: other processes may use the rest.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        total, free = _host()
    allowed = min(int(total * fraction), free + weights)
    return Budget(total, allowed, weights, workspace)


def _host() -> tuple[int, int]:
    """Total and available bytes; in a container with a limit, the limit is the total, of which its
    other processes may use a part."""
    total, free = (_value(_MEMINFO, name) * 1024 for name in ("MemTotal:", "MemAvailable:"))
    file = _CGROUP / "memory.max"
    limit = file.read_text().strip() if file.is_file() else "max"
    if limit == "max":
        return total, free
    cached = _value(_CGROUP / "memory.stat", "inactive_file")  # which the kernel can free
    used = int((_CGROUP / "memory.current").read_text()) - cached
    return min(total, int(limit)), min(free, int(limit) - used)


def _value(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        key, value, *_ = line.split()
        if key == name:
            return int(value)
    raise OSError(f"{file} has no line {name}")
