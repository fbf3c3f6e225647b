"""Linear layers that are fast with few rows on a CPU. Knows tensors only.

A decode step multiplies 1 to a few hundred rows by each weight. With plain weights, float32
products of 3 to 63 rows run at a fraction of the processor's speed; with weights packed for oneDNN
ahead of time they do not (`python -m benchmarks.linear`). Plain weights stay, as one or two rows
are faster with them: on a CPU, the memory for weights doubles. Layers that read the same rows
(query, key and value; gate and up) become one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The number of rows that the packed layout is chosen for; it serves all others well too.
_PACKED_FOR_ROWS = 64
_PLAIN_UP_TO_ROWS = 2

# Children of one module that are always called with the same rows, in this order.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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


class _Joint:
    """One product for several layers, computed when the first of them is called."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.linear = PackedLinear(
            torch.cat([layer.weight.detach() for layer in layers]),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )
        self._rows: Tensor | None = None
        self._products: tuple[Tensor, ...] = ()

    def product(self, number: int, rows: Tensor) -> Tensor:
        """Layer `number` of these rows; the last layer lets go of all."""
        if rows is not self._rows:
            self._rows, self._products = rows, self.linear(rows).split(self.sizes, dim=-1)
        product = self._products[number]
        if number == len(self.sizes) - 1:
            self._rows, self._products = None, ()
        return product


class _Slice(nn.Module):
    """One of the layers of a joint product."""

    def __init__(self, joint: _Joint, number: int) -> None:
        super().__init__()
        first = sum(joint.sizes[:number])
        self.weight = joint.linear.weight[first : first + joint.sizes[number]]
        self._joint = joint
        self._number = number

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]; a view into the joint product."""
        return self._joint.product(self._number, rows)


def pack(model: nn.Module) -> list[PackedLinear]:
    """Replace every linear layer of a float32 CPU model; returns the products that are left."""
    packed: list[PackedLinear] = []
    for parent in list(model.modules()):
        for names in _TOGETHER:
            layers = [getattr(parent, name, None) for name in names]
            if _can_join(layers):
                joint = _Joint(layers)  # type: ignore[arg-type]
                packed.append(joint.linear)
                for number, name in enumerate(names):
                    setattr(parent, name, _Slice(joint, number))
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                bias = None if child.bias is None else child.bias.detach()
                packed.append(PackedLinear(child.weight.detach(), bias))
                setattr(parent, name, packed[-1])
    return packed


def _can_join(layers: Sequence[Any]) -> bool:
    if any(type(layer) is not nn.Linear for layer in layers):
        return False
    return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
