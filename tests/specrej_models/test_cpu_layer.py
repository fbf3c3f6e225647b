"""Which models' layers are replaced. That the results are the same is tested in test_engine.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from generator_service.engine.model import CausalLM
from specrej_models.cpu import layer as cpu_layer
from specrej_models.cpu.layer import CPULayers
from specrej_models.kv import KVShape
from tests.generator_service import tiny

REPLACED = {"llama", "llama-mha", "qwen2"}


def are_replaced(model: Any) -> bool:
    return any(isinstance(layer, CPULayers) for layer in model.get_decoder().layers)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_layers_of_the_llama_kind_are_replaced(name: str) -> None:
    """Guards against a speed-up that silently stops, or that takes layers it cannot stand for."""
    network = tiny.build(name)
    CausalLM(network, tiny.END_IDS)
    assert are_replaced(network) == (name in REPLACED)


def _other_activation(network: Any) -> None:
    network.get_decoder().layers[1].mlp.act_fn = nn.GELU()


def _one_more_part(network: Any) -> None:
    network.get_decoder().layers[0].mlp.gate = nn.Linear(2, 2)


def _half_rotated(network: Any) -> None:
    """Guards against angles that are read from beyond their end."""
    rotary = network.get_decoder().rotary_emb
    rotary.inv_freq = rotary.inv_freq[: len(rotary.inv_freq) // 2]


def _other_norm(network: Any) -> None:
    """Guards against a norm of the same parts that computes something else."""
    norm = network.get_decoder().layers[2].input_layernorm
    forward = norm.forward
    norm.forward = lambda rows: forward(rows) + rows


@pytest.mark.parametrize("change", [_other_activation, _one_more_part, _half_rotated, _other_norm])
def test_layers_that_compute_something_else_stay(change: Any) -> None:
    """Guards against recognising a layer by its parts' names alone."""
    network = tiny.build()
    change(network)
    network.set_attn_implementation("specrej")
    cpu_layer.replace(network, KVShape(3, 2, 16, torch.float32, torch.device("cpu")), 256)
    assert not are_replaced(network)
