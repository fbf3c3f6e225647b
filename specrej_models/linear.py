"""Linear layers that are fast with few rows on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from specrej_models.cpu.jobs import job_record
from specrej_models.cpu.product import PRODUCT, product
from specrej_models.cpu.tiles import PANEL


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference on float32 rows, its weights laid out for `cpu.product`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in], bias: [out]; both are copied."""
        super().__init__()
        self.in_features: int = weight.shape[1]
        self.out_features: int = weight.shape[0]
        panels = _panels(weight)
        packed_bias = None if bias is None else _panels(bias[:, None])
        self.register_buffer("_packed", panels, persistent=False)
        self.register_buffer("_bias", packed_bias, persistent=False)
        self._constants = {
            "weight": panels.data_ptr(),
            "inputs": self.in_features,
            "outputs": self.out_features,
            "bias": 0 if packed_bias is None else packed_bias.data_ptr(),
        }
        # Whether results stay where they are until the next call, which overwrites them: memory
        # that is new costs as much time as some of the products that fill it.
        self.keeps_results = False
        self._kept = torch.empty(0)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        output = self._output(rows)
        rows = rows.contiguous()
        count = rows.numel() // self.in_features
        job = job_record(
            PRODUCT,
            rows=count,
            input=rows.data_ptr(),
            output=output.data_ptr(),
            **self._constants,
        )
        product.run(job, count * self.in_features * self.out_features)
        return output

    def _output(self, rows: Tensor) -> Tensor:
        shape = (*rows.shape[:-1], self.out_features)
        if not self.keeps_results:
            return rows.new_empty(shape)
        size = math.prod(shape)
        if self._kept.numel() < size:
            self._kept = torch.empty(0)  # first, so that there is never both
            self._kept = rows.new_empty(size)
        return self._kept[:size].view(shape)


def _panels(weight: Tensor) -> Tensor:
    """[out, in] to [panels, in, PANEL], filled up with zeros."""
    outputs, inputs = weight.shape
    panels = weight.new_zeros(-(-outputs // PANEL), inputs, PANEL)
    for number, part in enumerate(torch.split(weight, PANEL)):
        panels[number, :, : len(part)] = part.T
    return panels


def pack(model: nn.Module) -> None:
    """Replace every linear layer of a float32 CPU model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, packed(child))


def packed(layer: nn.Linear) -> PackedLinear:
    """A layer for inference with the weights and the bias of `layer`."""
    bias = None if layer.bias is None else layer.bias.detach()
    return PackedLinear(layer.weight.detach(), bias)
