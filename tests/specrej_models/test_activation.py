"""Activations: the values of torch's own, and bits that do not depend on the number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from specrej_models import activation


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Parts of threads end at other places than with one or two."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [48, 4864, 9728])
def test_a_row_has_the_bits_of_any_batch(three_threads: None, name: str, size: int) -> None:
    """Guards survivors against other draws because fewer candidates are left."""
    model = nn.Sequential(ACT2FN[name])
    rows = 4 * torch.randn(24, size, generator=torch.Generator().manual_seed(0))
    rows[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    expected = model(rows)
    activation.replace(model)
    assert type(model[0]).__module__ == activation.__name__
    whole = model(rows)
    assert torch.allclose(whole, expected, rtol=1e-5, atol=1e-6)
    for count in range(1, 24):
        assert torch.equal(model(rows[:count]), whole[:count]), count
