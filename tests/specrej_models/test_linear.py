"""Products with joined weights: equal to torch's, and the same for a row whatever its batch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from specrej_models.cpu.jobs import job_record
from specrej_models.cpu.product import PRODUCT
from specrej_models.cpu.product import product as multiplication
from specrej_models.cpu.tiles import PANEL
from specrej_models.linear import PackedLinear, joined

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 40, 127, 128, 129, 300)


@pytest.mark.parametrize("inputs", [1, 24, 577])
@pytest.mark.parametrize("outputs", [1, PANEL - 1, PANEL, 2 * PANEL + 5])
@pytest.mark.parametrize("bias", [True, False])
def test_products_equal_torchs(inputs: int, outputs: int, bias: bool) -> None:
    """Guards tiles of every size, the last panel, and blocks of rows."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    product_of = joined(layer)
    for rows in ROWS:
        data = torch.randn(2, rows, inputs)
        expected = layer(data).detach()
        torch.testing.assert_close(product_of(data), expected, rtol=1e-5, atol=1e-5)


def test_a_rows_results_do_not_depend_on_its_batch() -> None:
    """Survivors of a cut go on exactly as they would have, to the last bit."""
    layer = PackedLinear(torch.randn(333, 577), torch.randn(333))
    data = torch.randn(300, 577)
    whole = layer(data)
    for first, count in product((0, 1, 131), (1, 5, 8, 64, 169)):
        part = layer(data[first : first + count])
        torch.testing.assert_close(part, whole[first : first + count], rtol=0, atol=0)


def test_rows_need_not_be_contiguous() -> None:
    layer = nn.Linear(24, 10)
    data = torch.randn(24, 7).T
    torch.testing.assert_close(joined(layer)(data), layer(data).detach(), rtol=1e-5, atol=1e-5)


def test_products_can_be_added() -> None:
    """Guards the residual stream, which the next layer reads."""
    layer = nn.Linear(24, 100)
    total, data = torch.randn(9, 100), torch.randn(9, 24)
    expected = total + layer(data).detach()
    packed = joined(layer)
    addresses = {"input": data.data_ptr(), "output": total.data_ptr()}
    job = job_record(PRODUCT, **packed.job, **addresses, rows=9, adds=1)
    multiplication.run(job, work=0)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_joined_layers_equal_each_alone(bias: bool, rows: int) -> None:
    """Guards against outputs of joint products that are swapped, or biases forgotten."""
    layers = [nn.Linear(24, size, bias=bias) for size in (24, 8, 16)]
    data = torch.randn(rows, 24)
    expected = torch.cat([layer(data) for layer in layers], dim=-1)
    torch.testing.assert_close(joined(*layers)(data), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, PANEL // 2, PANEL + 7])
def test_gates_are_silu(bias: bool, size: int) -> None:
    """Guards against gates that meet another output, and values far from 0."""
    gate, up = (nn.Linear(24, size, bias=bias) for _ in range(2))
    # Of few bits, so that the sums are exact in any order: only silu rounds.
    with torch.no_grad():
        for weights in (*gate.parameters(), *up.parameters()):
            weights.copy_((64 * weights).round() / 64)
    data = (30 * torch.randn(11, 24)).round()
    expected = nn.functional.silu(gate(data)) * up(data)
    actual = joined(gate, up, gates=True)(data)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-5, atol=1e-4)
