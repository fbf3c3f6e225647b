"""Linear layers that are fast with few rows on a CPU. Knows tensors only.

A decode step multiplies 1 to a few hundred rows by each weight. With plain weights, float32
products of 3 to 63 rows run at a fraction of the processor's speed; with weights packed for oneDNN
ahead of time they do not (`python -m benchmarks.linear`). Plain weights stay, as one or two rows
are faster with them: on a CPU, the memory for weights doubles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The number of rows that the packed layout is chosen for; it serves all others well too.
_PACKED_FOR_ROWS = 64
_PLAIN_UP_TO_ROWS = 2


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference; `weight` and `bias` are the very tensors it was made from."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        operations: Any = torch.ops.mkldnn
        self._packed: Tensor = operations._reorder_linear_weight(
            linear.weight.detach(), _PACKED_FOR_ROWS
        )
        self._multiply = operations._linear_pointwise

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if rows.numel() <= _PLAIN_UP_TO_ROWS * rows.shape[-1]:
            return F.linear(rows, self.weight, self.bias)
        product: Tensor = self._multiply(rows, self._packed, self.bias, "none", [], "")
        return product


def pack(model: nn.Module) -> None:
    """Replace every linear layer of a float32 CPU model; elsewhere there is nothing to gain."""
    weights = next(model.parameters())
    if weights.device.type != "cpu" or weights.dtype != torch.float32:
        return
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
