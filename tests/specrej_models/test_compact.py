"""Weights in fewer bytes than float32: found where there are, and the same to the last bit."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from specrej_models.compact import compact
from specrej_models.cpu.product import BFLOAT16, FLOAT32, GROUP, INT4, INT8, MAX_COMPACT_ROWS
from specrej_models.cpu.tiles import PANEL
from specrej_models.linear import PackedLinear

INPUTS, OUTPUTS = 7 * GROUP, 2 * PANEL + 5
# What blocks of GGUF need: four bits, or five and eight.
KINDS = {
    Kind.Q4_0: INT4,
    Kind.Q4_1: INT4,
    Kind.Q5_0: INT8,
    Kind.Q5_1: INT8,
    Kind.Q8_0: INT8,
}


def _weight(kind: Kind, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Tensor:
    """[outputs, inputs], as they come out of a file of that kind."""
    weight = torch.randn(outputs, inputs) * torch.rand(outputs, 1)
    blocks = gguf.quants.quantize(weight.numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


def _form(weight: Tensor) -> int:
    panel = torch.zeros(1, weight.shape[1], PANEL)
    panel[0, :, : len(weight)] = weight[:PANEL].T
    return compact(panel)[0]


def _same_for_few_rows(weight: Tensor, form: int) -> None:
    """Many rows are multiplied with the weights as they are, few with their compact form."""
    packed = PackedLinear(weight, torch.randn(len(weight)))
    assert packed.job(1)["form"] == packed.job(MAX_COMPACT_ROWS)["form"] == form
    assert packed.job(MAX_COMPACT_ROWS + 1)["form"] == FLOAT32
    data = torch.randn(MAX_COMPACT_ROWS + 1, weight.shape[1])
    expected = packed(data)
    for rows in range(1, MAX_COMPACT_ROWS + 1):
        torch.testing.assert_close(packed(data[:rows]), expected[:rows], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_block_formats(kind: Kind) -> None:
    """Guards against steps that are guessed wrong, and products that end in other bits."""
    weight = _weight(kind)
    assert _form(weight) == KINDS[kind]
    _same_for_few_rows(weight, KINDS[kind])


@pytest.mark.parametrize("inputs", [1, GROUP, INPUTS + 1])
def test_weights_of_bfloat16(inputs: int) -> None:
    """Groups need not be full."""
    weight = torch.randn(OUTPUTS, inputs).bfloat16().float()
    assert _form(weight) == BFLOAT16
    _same_for_few_rows(weight, BFLOAT16)


def test_joint_weights_may_be_of_several_formats() -> None:
    """Files of mixed formats: a layer's values are often stored in more bits than its queries."""
    weight = torch.cat([_weight(kind, outputs=7) for kind in KINDS])
    assert _form(weight) == INT8
    _same_for_few_rows(weight, INT8)


@pytest.mark.parametrize("value", [0.0, -0.1, 3.7])
def test_groups_without_a_step(value: float) -> None:
    """Guards against divisions by 0: all weights of a group may be the same."""
    weight = _weight(Kind.Q4_1)
    weight[3, GROUP : 2 * GROUP] = value
    assert _form(weight) == INT4
    _same_for_few_rows(weight, INT4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-30, 0.123456789])
def test_one_weight_that_does_not_fit_keeps_all_as_they_are(value: float) -> None:
    """Guards against weights that are rounded, whatever they are."""
    weight = _weight(Kind.Q4_1)
    weight[PANEL // 2, INPUTS - 1] = value
    assert _form(weight) == FLOAT32


def test_plain_weights_are_not_copied() -> None:
    panels = torch.randn(3, INPUTS, PANEL)
    form, data = compact(panels)
    assert form == FLOAT32
    assert data is panels


def test_compact_forms_take_what_they_say() -> None:
    """Bytes per weight: half a byte, and a step and a lowest weight for 32 of them."""
    weight = _weight(Kind.Q4_1, outputs=4 * PANEL)
    panels = torch.unflatten(weight.T, 1, (4, PANEL)).movedim(1, 0)
    form, data = compact(panels.contiguous())
    assert form == INT4
    assert data.nbytes == panels.numel() * 0.75
