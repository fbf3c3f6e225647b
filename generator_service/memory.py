"""How much memory is left for KV slots: a fraction of the total, less weights and workspace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
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
    """Total and available bytes; in a container with a limit, the limit is the total."""
    total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return (total, free) if limit == "max" else (min(total, int(limit)), free)


def _meminfo(name: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_MEMINFO} has no line {name}")
