"""Which layers and norms are replaced, and that what replaces them computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from generator_service.engine.model import CausalLM
from specrej_models import norm
from specrej_models.cpu import layer as cpu_layer
from specrej_models.cpu.layer import CPULayers
from specrej_models.kv import KVShape
from tests.generator_service import tiny

REPLACED = {"llama", "llama-mha", "mistral", "mistral-window", "qwen2"}


def layers_of(model: Any) -> Any:
    return model.get_decoder().layers


def replaced(model: Any) -> list[bool]:
    """Of each of a model's layers, whether it was."""
    compiled: list[bool] = []
    for layer in layers_of(model):
        compiled += [True] * len(layer.layers) if isinstance(layer, CPULayers) else [False]
    return compiled


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_layers_of_the_llama_kind_are_replaced(name: str) -> None:
    """Guards against a speed-up that silently stopped, or that takes a layer it cannot stand for.

    That results are the same is tested for each of them in test_engine.py.
    """
    network = tiny.build(name)
    CausalLM(network)
    assert replaced(network) == [name in REPLACED] * 3


def test_a_layer_that_computes_something_else_stays() -> None:
    """Guards against recognising a layer by its parts' names alone."""
    network = tiny.build()
    layers_of(network)[1].mlp.act_fn = nn.GELU()
    CausalLM(network)
    assert replaced(network) == [True, False, True]


def test_a_layer_with_one_more_part_stays() -> None:
    network = tiny.build()
    layers_of(network)[0].mlp.gate = nn.Linear(2, 2)
    shape = KVShape(3, 2, 16, torch.float32, torch.device("cpu"))
    network.set_attn_implementation("specrej")
    cpu_layer.replace(network, shape, 256)
    assert replaced(network) == [False, True, True]


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("rows", [1, 8, 77])
def test_norms_equal_those_they_replace(name: str, rows: int) -> None:
    """Guards both kinds: a plain weight, and one that is added to 1 (Gemma)."""
    original = layers_of(tiny.build(name))[0].input_layernorm
    replacement = norm.replacement_of(original)
    assert replacement
    data = 3 * torch.randn(rows, original.weight.numel())
    torch.testing.assert_close(replacement(data), original(data), rtol=1e-5, atol=1e-6)


def test_other_norms_stay() -> None:
    """Guards against a layer norm taken for an RMS norm."""
    assert norm.replacement_of(nn.LayerNorm(16, bias=False)) is None
    assert norm.replacement_of(nn.Linear(4, 4)) is None


def test_layers_that_rotate_a_part_of_each_head_stay() -> None:
    """Guards against turning by angles that are read from beyond their end."""
    network = tiny.build()
    half = network.get_decoder().rotary_emb
    half.inv_freq = half.inv_freq[: len(half.inv_freq) // 2]
    network.set_attn_implementation("specrej")
    cpu_layer.replace(network, KVShape(3, 2, 16, torch.float32, torch.device("cpu")), 256)
    assert not any(replaced(network))
