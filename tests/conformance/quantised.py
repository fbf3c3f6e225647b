"""Writes quantised checkpoints of a tiny model in several formats, and the weights they store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_GROUP = 32  # inputs that share a scale
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

# The tensors of a layer in a format by the ends of their names, and its weights [out, in].
Layer = tuple[dict[str, Tensor], Tensor]


def _int8(weight: Tensor) -> Layer:
    """One scale for each output; the activations are quantised at run time."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    whole = (weight / scale).round()
    return {"weight": whole.to(torch.int8), "weight_scale": scale}, whole * scale


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0 .. 15 [out, in], of which 8 is zero; scales [out, groups]; the weights."""
    groups = weight.view(len(weight), -1, _GROUP)
    scale = groups.abs().amax(dim=2) / 7
    whole = (groups / scale[..., None]).round().clamp(-8, 7)
    return (whole + 8).int().flatten(1), scale, (whole * scale[..., None]).flatten(1)


def _packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers of the last dimension in each int32, the first of `order` lowest."""
    parts = numbers.long().reshape(len(numbers), -1, 8)[..., list(order)]
    packed: Tensor = (parts << (torch.arange(8) * 4)).sum(-1)
    return packed.to(torch.int32)


def _int4(weight: Tensor) -> Layer:
    numbers, scale, weights = _four_bits(weight)
    shape = torch.tensor(weight.shape)
    return {
        "weight_packed": _packed(numbers),
        "weight_scale": scale,
        "weight_shape": shape,
    }, weights


def _gptq(weight: Tensor) -> Layer:
    numbers, scale, weights = _four_bits(weight)
    inputs, groups = weight.shape[1], scale.shape[1]
    tensors = {
        "qweight": _packed(numbers).T,
        "qzeros": _packed(torch.full((groups, weight.shape[0]), 7)),  # stored as zero - 1
        "scales": scale.T,
        "g_idx": torch.arange(inputs, dtype=torch.int32) // _GROUP,
    }
    return tensors, weights


def _awq(weight: Tensor) -> Layer:
    numbers, scale, weights = _four_bits(weight)
    zeros = torch.full((scale.shape[1], weight.shape[0]), 8)
    tensors = {
        "qweight": _packed(numbers.T, _AWQ_ORDER),
        "qzeros": _packed(zeros, _AWQ_ORDER),
        "scales": scale.T,
    }
    return tensors, weights


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> Any:
    """The configuration of compressed-tensors."""
    common = {"type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, **weights},
        "input_activations": activations and {**common, "dynamic": True, **activations},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[Callable[[Tensor], Layer], dict[str, Any]]] = {
    "compressed-tensors W8A8": (
        _int8,
        _compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "strategy": "token"},
        ),
    ),
    "compressed-tensors W4A16": (
        _int4,
        _compressed(
            "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": _GROUP}, None
        ),
    ),
    "GPTQ": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True},
    ),
    "AWQ": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
}


def save_quantised(model: Path, name: str, quantised: Path, whole: Path) -> None:
    """The model in a format, and a model of the weights that the format stores."""
    quantise, config = FORMATS[name]
    shutil.copytree(model, quantised)
    shutil.copytree(model, whole)
    tensors: dict[str, Tensor] = {}
    weights = load_file(model / "model.safetensors")
    for key, weight in list(weights.items()):
        if not key.endswith("_proj.weight"):
            tensors[key] = weight
            continue
        layer, weights[key] = quantise(weight)
        prefix = key.removesuffix("weight")
        tensors |= {f"{prefix}{end}": tensor.contiguous() for end, tensor in layer.items()}
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    path = quantised / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
