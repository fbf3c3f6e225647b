"""Linear layers that are fast with few rows on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specrej_models.cpu.jobs import job_record
from specrej_models.cpu.product import HALF, PRODUCT, product
from specrej_models.cpu.tiles import PANEL


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference on float32 rows, its weights laid out for `cpu.product`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gates: bool = False) -> None:
        """weight: [out, in], bias: [out]; both are copied.

        `gates`: results are silu(first half) * second half.
        """
        super().__init__()
        self.in_features: int = weight.shape[1]
        self.out_features: int = weight.shape[0]
        panels = _panels(weight, gates)
        packed_bias = None if bias is None else _panels(bias[:, None], gates)
        self.register_buffer("_packed", panels, persistent=False)
        self.register_buffer("_bias", packed_bias, persistent=False)
        self._results = self.out_features // 2 if gates else self.out_features
        self.job = {
            "weight": panels.data_ptr(),
            "inputs": self.in_features,
            "outputs": self._results,
            "bias": 0 if packed_bias is None else packed_bias.data_ptr(),
            "gates": gates,
        }

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out], or to half of them with gates."""
        output = rows.new_empty(*rows.shape[:-1], self._results)
        rows = rows.contiguous()
        count = rows.numel() // self.in_features
        job = job_record(
            PRODUCT, rows=count, input=rows.data_ptr(), output=output.data_ptr(), **self.job
        )
        product.run(job, count * self.in_features * self.out_features)
        return output


def _panels(weight: Tensor, gates: bool) -> Tensor:
    """[out, in] to [panels, in, PANEL], filled up with zeros."""
    if gates:
        return torch.cat([_blocks(side, HALF) for side in torch.chunk(weight, 2)], dim=-1)
    return _blocks(weight, PANEL)


def _blocks(weight: Tensor, size: int) -> Tensor:
    """[out, in] to [blocks, in, size]."""
    outputs, inputs = weight.shape
    blocks = weight.new_zeros(-(-outputs // size), inputs, size)
    for number, part in enumerate(torch.split(weight, size)):
        blocks[number, :, : len(part)] = part.T
    return blocks


def pack(model: nn.Module) -> None:
    """Replace every linear layer of a float32 CPU model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, joined(child))


def joined(*layers: nn.Linear, gates: bool = False) -> PackedLinear:
    """One product for layers that read the same rows, their outputs side by side.

    `gates`: of two layers, the first gates the second.
    """
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return PackedLinear(weight, torch.cat(biases) if biases else None, gates)
