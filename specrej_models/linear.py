"""Linear layers that are fast with few rows on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from specrej_models.compact import compact
from specrej_models.cpu.jobs import job_record
from specrej_models.cpu.product import FLOAT32, HALF, MAX_COMPACT_ROWS, PRODUCT, product
from specrej_models.cpu.tiles import PANEL


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference on float32 rows, its weights laid out for `cpu_product`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gates: bool = False) -> None:
        """weight: [out, in], bias: [out]; both are copied.

        Where the weights need fewer bytes than float32, there is a second copy of them for few
        rows, to the same last bit.

        `gates`: what comes out is silu(first half) * second half.
        """
        super().__init__()
        self.in_features: int = weight.shape[1]
        self.out_features: int = weight.shape[0]
        packed = _panels(weight, gates)
        form, compacted = compact(packed)
        packed_bias = None if bias is None else _panels(bias[:, None], gates)
        self.register_buffer("_packed", packed, persistent=False)
        self.register_buffer("_compacted", compacted, persistent=False)
        self.register_buffer("_bias", packed_bias, persistent=False)
        self._results = self.out_features // 2 if gates else self.out_features
        self._constants = {
            "inputs": self.in_features,
            "outputs": self._results,
            "bias": 0 if packed_bias is None else packed_bias.data_ptr(),
            "gates": gates,
        }
        # Whether results stay where they are until the next call, which overwrites them: memory
        # that is new costs as much time as some of the products that fill it.
        self.keeps_results = False
        self._kept = torch.empty(0)
        self._for_many = {"weight": packed.data_ptr(), "form": FLOAT32}
        self._for_few = {"weight": compacted.data_ptr(), "form": form}

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out], or to half of them with gates."""
        output = self._output(rows)
        rows = rows.contiguous()
        count = rows.numel() // self.in_features
        job = job_record(
            PRODUCT, **self.job(count), input=rows.data_ptr(), output=output.data_ptr()
        )
        product.run(job, count * self.in_features * self.out_features)
        return output

    def _output(self, rows: Tensor) -> Tensor:
        shape = (*rows.shape[:-1], self._results)
        if not self.keeps_results:
            return rows.new_empty(shape)
        size = math.prod(shape)
        if self._kept.numel() < size:
            self._kept = torch.empty(0)  # first, so that there is never both
            self._kept = rows.new_empty(size)
        return self._kept[:size].view(shape)

    def job(self, rows: int) -> dict[str, int]:
        """A job's fields, all but the addresses of the rows and of the results."""
        return {
            "rows": rows,
            **self._constants,
            **(self._for_few if rows <= MAX_COMPACT_ROWS else self._for_many),
        }


def _panels(weight: Tensor, gates: bool) -> Tensor:
    """[out, in] to [panels, in, PANEL], filled up with zeros."""
    if gates:
        sides = [_blocks(side, HALF) for side in torch.chunk(weight, 2)]
        return torch.cat(sides, dim=-1)
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
