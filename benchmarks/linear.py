"""The matrix products of one decode step: `python -m benchmarks.linear`.

Torch, oneDNN with packed weights, and ours with weights of 32 and of 4 bits, at the weight shapes
of the embedded model. Every layer has its own weights, so they are read from memory as in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.engine import products_seconds
from benchmarks.harness import interleave, log, parse_arguments, report
from specrej.inference.linear import PackedLinear

# [out, in] of a layer's products, and of the LM head; those of SmolLM2-135M.
_LAYERS, _LAYER = 30, ((960, 576), (576, 576), (3072, 576), (576, 1536))
_LM_HEAD = (49152, 576)


class _OneDNN(nn.Module):
    """Weights in oneDNN's own layout, chosen for 64 rows; it is fast for other numbers too."""

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
    """Weights in torch's layout."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self._weight = weight

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self._weight)


_IMPLEMENTATIONS: dict[str, Callable[[Tensor], nn.Module]] = {
    "torch": _Plain,
    "onednn": _OneDNN,
    "specrej": lambda weight: PackedLinear(weight, None),
    "specrej, 4 bits": lambda weight: PackedLinear(_of_four_bits(weight), None),
}


def _of_four_bits(weight: Tensor) -> Tensor:
    """Weights [out, in] as in a 4-bit checkpoint: blocks of 32, each 16 multiples of a step."""
    blocks = weight.view(len(weight), -1, 32)
    least, most = blocks.aminmax(dim=-1, keepdim=True)
    step = ((most - least) / 15).half().float()
    counts = ((blocks - least) / step).round()
    return (counts.clamp(0, 15) * step + least).view(weight.shape)


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        rows=([1, 2, 4, 8, 16, 32, 64, 128, 256], "rows of the other factor"),
        rounds=(3, "measured rounds"),
    )
    shapes = [*_LAYER * _LAYERS, _LM_HEAD]
    products = {
        name: [make(torch.randn(shape)) for shape in shapes]
        for name, make in _IMPLEMENTATIONS.items()
    }
    num_weights = sum(outputs * inputs for outputs, inputs in shapes)
    table, results = [], []
    for rows in arguments.rows:
        runs = {
            name: partial(products_seconds, layers, rows, 0.5) for name, layers in products.items()
        }
        seconds = {name: min(passes) for name, passes in interleave(runs, arguments.rounds).items()}
        log(f"{rows} rows: {seconds}")
        gflops = {name: 2e-9 * num_weights * rows / s for name, s in seconds.items()}
        table.append((rows, *(f"{s * 1e3:.1f} ({gflops[n]:.0f})" for n, s in seconds.items())))
        times_ms = {name: round(s * 1e3, 2) for name, s in seconds.items()}
        results.append({"rows": rows, "ms": times_ms})
    report(
        "products of one step: milliseconds (GFLOP/s)",
        ("rows", *_IMPLEMENTATIONS),
        table,
        {"results": results, "weights_mb": 4 * num_weights / 1e6},
    )


if __name__ == "__main__":
    main()
