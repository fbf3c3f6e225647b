"""Activations of torch operations whose last bits do not depend on how many rows there are.

In torch's own SiLU and GELU, vectors of numbers and the rest of a thread's part have different
code, and where a part ends depends on the rows of a step. `exp` and `tanh` have one code for both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh as TheirGELUTanh
from transformers.activations import SiLUActivation

_SLOPE = math.sqrt(2 / math.pi)


class SiLU(nn.Module):
    """x / (1 + exp(-x))."""

    def forward(self, rows: Tensor) -> Tensor:
        """Any shape to the same."""
        return rows / torch.exp(-rows).add_(1)


class GELUTanh(nn.Module):
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3))) / 2 (Hendrycks and Gimpel 2016)."""

    def forward(self, rows: Tensor) -> Tensor:
        """Any shape to the same."""
        inner = (rows * rows).mul_(rows).mul_(0.044715).add_(rows).mul_(_SLOPE)
        return inner.tanh_().add_(1).mul_(rows).mul_(0.5)


_REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    nn.SiLU: SiLU,
    SiLUActivation: SiLU,
    TheirGELUTanh: GELUTanh,
}


def replace(model: nn.Module) -> None:
    """Replace every module that computes one of these."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if replacement := _REPLACED.get(type(child)):
                setattr(parent, name, replacement())
