"""The memory of a generator: weights, the workspace of a step, and what is left for KV slots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrej_models.sizes import CPU_COLUMNS, SCORE_BYTES, SCORES_AT_ONCE, ModelSizes

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_DTYPE_BYTES = {"cpu": 4, "cuda": 2}


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory and limits of the own engine.

    usable_bytes: for weights, workspace and KV; device: "cpu" (float32) or "cuda" (two bytes);
    threads: of compiled attention, 0: torch's operations.
    """

    sizes: ModelSizes
    weight_bytes: int
    usable_bytes: int
    context_tokens: int
    max_candidates: int
    prefill_chunk: int
    device: str
    threads: int = 0

    @property
    def workspace_bytes(self) -> int:
        """Most that one step allocates for a moment: activations, scores, logits, sampling.

        The largest step has `max_candidates` rows and `prefill_chunk` tokens of a prompt. The sum
        is of the tensors that live at once in the widest places of a layer and after the last one.
        """
        sizes, rows, chunk = self.sizes, self.max_candidates, self.prefill_chunk
        of_row = sizes.heads * self.context_tokens
        if self.threads:  # each holds one share's scores of all tokens
            scores = self.threads * 4 * CPU_COLUMNS * self.context_tokens
        else:
            scores = SCORE_BYTES * min(max(rows, chunk) * of_row, max(SCORES_AT_ONCE, of_row))
        # Queries, their rotated halves and two orders of them, keys, values, parts of the output.
        attention = 8 * sizes.heads * sizes.head_dim
        widest = 4 * sizes.hidden + max(attention, 4 * sizes.intermediate)
        layer = (rows + chunk) * widest * _DTYPE_BYTES[self.device]
        logits = (rows + 1) * sizes.vocabulary * (_DTYPE_BYTES[self.device] + 4)
        return max(layer + scores, logits + sizes.sampling_bytes(rows, self.device))

    @property
    def slots(self) -> int:
        """Slots that candidates and prompts may hold."""
        room = max(0, self.usable_bytes - self.weight_bytes - self.workspace_bytes)
        return room // self.sizes.slot_bytes(_DTYPE_BYTES[self.device])


def host_memory() -> tuple[int, int]:
    """Available and total bytes; in a container with a limit, the limit is the total, of which its
    other processes may use a part."""
    machine = _read_numbers(_MEMINFO)
    free, total = machine["MemAvailable:"] * 1024, machine["MemTotal:"] * 1024
    file = _CGROUP / "memory.max"
    limit = file.read_text().strip() if file.is_file() else "max"
    if limit == "max":
        return free, total
    cached = _read_numbers(_CGROUP / "memory.stat")["inactive_file"]  # which the kernel can free
    used = int((_CGROUP / "memory.current").read_text()) - cached
    return min(free, int(limit) - used), min(total, int(limit))


def _read_numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(value) for name, value, *_ in lines}
