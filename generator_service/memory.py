"""How many KV slots fit: memory times a fraction, less weights and workspace. Knows no sessions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from generator_service.sampling import WORKSPACE_TENSORS, rows_at_once

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What decides how much memory a forward pass takes besides weights and KV."""

    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    dtype_bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes: all there are, those the generator may take, and what goes off before KV."""

    total: int
    allowed: int
    weights: int
    workspace: int

    @property
    def kv_bytes(self) -> int:
        return max(0, self.allowed - self.weights - self.workspace)


def budget(device: torch.device, fraction: float, weights: int, workspace: int) -> Budget:
    """What is left for KV once the weights are loaded.

    Never more than is free now, whoever else has taken it.
    """
    total, free = _cuda(device) if device.type == "cuda" else _host()
    allowed = min(int(total * fraction), free + weights)
    return Budget(total, allowed, weights, workspace)


def workspace_bytes(sizes: Sizes, max_rows: int, prefill_chunk: int, device: torch.device) -> int:
    """Most that one step allocates for a moment: activations, scores, logits, sampling.

    The largest step has `max_rows` candidates and `prefill_chunk` tokens of a prompt. Counted are
    the tensors that live at once in the widest places of a layer and after the last one.
    """
    rows = max_rows + prefill_chunk
    attention = 3 * sizes.heads * sizes.head_dim
    layer = rows * (4 * sizes.hidden + max(attention, 4 * sizes.intermediate)) * sizes.dtype_bytes
    # Scores: of a chunk with what stands before it, twice; of all rows with a prompt they share.
    scores = sizes.heads * sizes.context_tokens * (3 * prefill_chunk + 2 * max_rows) * 4
    logits = (max_rows + 1) * sizes.vocabulary * (sizes.dtype_bytes + 4)
    block = min(max_rows, rows_at_once(sizes.vocabulary, device))
    sampling = block * sizes.vocabulary * 4 * WORKSPACE_TENSORS
    step = max(layer + scores, logits + sampling)
    if device.type == "cpu":
        return step
    # Recorded steps keep their activations, their logits and the attention's partial results.
    partial = 2 * max_rows * sizes.heads * sizes.head_dim * 4
    return step + layer + max_rows * sizes.vocabulary * 4 + partial


def _cuda(device: torch.device) -> tuple[int, int]:
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def _host() -> tuple[int, int]:
    """Total and available bytes, of the container where it is limited."""
    total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return (total, free) if limit == "max" else (min(total, int(limit)), free)


def _meminfo(name: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_MEMINFO} does not tell {name}")
