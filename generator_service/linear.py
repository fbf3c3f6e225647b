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
    """An `nn.Linear` for inference on float32 rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in], bias: [out]."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        operations: Any = torch.ops.mkldnn
        self._packed: Tensor = operations._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._multiply = operations._linear_pointwise

    @property
    def packed_bytes(self) -> int:
        """Of the packed copy."""
        return self._packed.numel() * self._packed.element_size()

    def tensors(self) -> list[Tensor]:
        """The plain weights."""
        return [tensor for tensor in (self.weight, self.bias) if tensor is not None]

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if rows.numel() <= _PLAIN_UP_TO_ROWS * rows.shape[-1]:
            return F.linear(rows, self.weight, self.bias)
        product: Tensor = self._multiply(rows, self._packed, self.bias, "none", [], "")
        return product


def pack(model: nn.Module) -> None:
    """Replace every linear layer of a float32 CPU model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, joined(child))


def joined(*layers: nn.Linear) -> PackedLinear:
    """One product for layers that read the same rows, their outputs side by side."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weights = [layer.weight.detach() for layer in layers]
    if len(layers) == 1:  # not copied, as it may be tied to the embedding
        return PackedLinear(weights[0], biases[0] if biases else None)
    return PackedLinear(torch.cat(weights), torch.cat(biases) if biases else None)
