"""Linear layers that are fast with few rows on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from generator_service.cpu_jobs import Job
from generator_service.cpu_product import PANEL, WORDS, product


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference on float32 rows, its weights laid out for `cpu_product`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in], bias: [out]; the weight is copied."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed = _panels(weight)
        self.register_buffer("_packed", packed, persistent=False)
        self.register_buffer("_bias", bias, persistent=False)
        bias_at = 0 if bias is None else bias.data_ptr()
        self._weights = (self.in_features, packed.data_ptr(), bias_at)
        self._job = Job(WORDS)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        output = rows.new_empty(*rows.shape[:-1], self.out_features)
        rows = rows.contiguous()
        count = rows.numel() // self.in_features
        words = self.words(count, rows.data_ptr(), output.data_ptr())
        product.run(self._job, words, count * self.in_features * self.out_features)
        return output

    def words(self, rows: int, data: int, output: int, adds: bool = False) -> tuple[int, ...]:
        """A job's words: from contiguous rows to rows, by their addresses.

        `adds`: to what is there already, instead of in its place.
        """
        return (rows, data, *self._weights, output, self.out_features, adds)


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
                setattr(parent, name, joined(child))


def joined(*layers: nn.Linear) -> PackedLinear:
    """One product for layers that read the same rows, their outputs side by side."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return PackedLinear(weight, torch.cat(biases) if biases else None)
