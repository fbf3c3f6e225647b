"""All products of one decode step, four ways, by rows: `python -m benchmarks.linear`.

torch's own with plain weights, oneDNN's with weights packed ahead of time, ours, and ours with
weights of four bits (which up to eight rows make use of), interleaved, for the weight shapes of the
embedded model. Every layer has its own weights, so they come from memory, as they do in a step. The
last line on stdout is one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.engine import products_seconds
from benchmarks.machine import describe_machine
from inference.linear import PackedLinear

# [out, in] of a layer's products, and of the last one; SmolLM2-135M's.
_LAYERS, _LAYER = 30, ((960, 576), (576, 576), (3072, 576), (576, 1536))
_LAST = (49152, 576)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ROUNDS = 3


class _OneDNN(nn.Module):
    """Weights in oneDNN's own layout, chosen for 64 rows; it serves other numbers well too."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        operations: Any = torch.ops.mkldnn
        self.in_features = weight.shape[1]
        self._packed: Tensor = operations._reorder_linear_weight(weight, 64)
        self._multiply = operations._linear_pointwise

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = self._multiply(rows, self._packed, None, "none", [], "")
        return product


class _Plain(nn.Module):
    """As torch has it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self._weight = weight

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self._weight)


_WAYS: dict[str, Callable[[Tensor], nn.Module]] = {
    "torch": _Plain,
    "onednn": _OneDNN,
    "specrej": lambda weight: PackedLinear(weight, None),
    "specrej, 4 bits": lambda weight: PackedLinear(_of_four_bits(weight), None),
}


def _of_four_bits(weight: Tensor) -> Tensor:
    """Weights [out, in] as a checkpoint of blocks of 32 has them: 16 multiples of a step."""
    blocks = weight.view(len(weight), -1, 32)
    least, most = blocks.aminmax(dim=-1, keepdim=True)
    step = ((most - least) / 15).half().float()
    counts = ((blocks - least) / step).round()
    return (counts.clamp(0, 15) * step + least).view(weight.shape)


def main() -> None:
    """Measure, print a table and a JSON object."""
    shapes = [*_LAYER * _LAYERS, _LAST]
    products = {
        name: [make(torch.randn(shape)) for shape in shapes] for name, make in _WAYS.items()
    }
    operations = 2 * sum(outputs * inputs for outputs, inputs in shapes)
    results = []
    table = Table(title="products of one step: milliseconds (GFLOP/s)")
    for heading in ("rows", *_WAYS):
        table.add_column(heading)
    for rows in _ROWS:
        seconds = {name: float("inf") for name in _WAYS}
        for _ in range(_ROUNDS):
            for name, layers in products.items():
                seconds[name] = min(seconds[name], products_seconds(layers, rows, 0.5))
        print(f"{rows} rows: {seconds}", file=sys.stderr, flush=True)
        cells = (f"{s * 1e3:.1f} ({operations * rows / s / 1e9:.0f})" for s in seconds.values())
        table.add_row(str(rows), *cells)
        times = {name: round(s * 1e3, 2) for name, s in seconds.items()}
        results.append({"rows": rows, "ms": times})
    Console(width=120).print(table)
    megabytes = sum(4 * outputs * inputs for outputs, inputs in shapes) / 1e6
    print(json.dumps({"results": results, "weights_mb": megabytes, **describe_machine()}))


if __name__ == "__main__":
    main()
