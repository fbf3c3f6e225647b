"""Products with plain and with packed weights, by rows: `python -m benchmarks.linear`.

In GFLOP/s, for the weight shapes of the embedded model; the best of many repetitions, interleaved.
The last line on stdout is one JSON object.
"""

from __future__ import annotations

import json
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.machine import describe_machine
from generator_service.linear import joined

SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576), (576, 49152))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def main() -> None:
    """Measure, print a table and a JSON object."""
    results = []
    table = Table(title="GFLOP/s, plain / packed")
    for heading in ("weights", *(f"{rows} rows" for rows in ROWS)):
        table.add_column(heading)
    with torch.inference_mode():
        for inputs, outputs in SHAPES:
            speeds = [_measure(inputs, outputs, rows) for rows in ROWS]
            cells = (f"{plain:.0f}/{packed:.0f}" for plain, packed in speeds)
            table.add_row(f"{inputs}x{outputs}", *cells)
            results.append({"in": inputs, "out": outputs, "rows": ROWS, "plain_packed": speeds})
    Console(width=120).print(table)
    print(json.dumps({"results": results, **describe_machine()}))


def _measure(inputs: int, outputs: int, rows: int) -> tuple[float, float]:
    plain = nn.Linear(inputs, outputs, bias=False)
    packed = joined(plain)
    data = torch.randn(rows, inputs)
    flops = 2 * rows * inputs * outputs
    best = [float("inf")] * 2
    for _ in range(max(6, int(2e9 / flops / 10))):
        for index, layer in enumerate((plain, packed)):
            best[index] = min(best[index], _seconds(layer, data))
    return round(flops / best[0] / 1e9, 1), round(flops / best[1] / 1e9, 1)


def _seconds(layer: nn.Module, data: Tensor) -> float:
    began = time.perf_counter()
    layer(data)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
