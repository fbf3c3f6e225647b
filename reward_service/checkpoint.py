"""Weights from a local directory: the backbone by transformers, heads by their tensors' names.

Heads are not loaded by transformers: it fills missing ones with random numbers, and for some heads
the class exists only in code that comes with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging as transformers_logging

from reward_service.specs import LocalSpec, Resources
from specrej_models.model import bound_positions

# The tensor in the file of a head that `training` writes, [hidden].
HEAD_TENSOR = "head"


def load_model(
    spec: LocalSpec, resources: Resources, auto_class: Any = AutoModel
) -> PreTrainedModel:
    """A model by one of transformers' Auto classes, with all its weights; float32 on the CPU.

    Sets torch's thread count, which belongs to the thread that sets it.

    Raises:
        ValueError: the directory lacks some of its weights.
    """
    if resources.threads:
        torch.set_num_threads(resources.threads)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # heads that it does not use are expected
    try:
        model, loading = auto_class.from_pretrained(
            spec.directory,
            local_files_only=True,
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=True,
            dtype=torch.float32 if resources.device == "cpu" else "auto",
            output_loading_info=True,
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
    missing = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
    if missing:
        raise ValueError(f"{spec.directory}: lacks {', '.join(missing[:3])}")
    bound_positions(model.config.get_text_config())
    loaded: PreTrainedModel = model.to(resources.device)
    return loaded


def load_head(source: Path, prefix: str, device: str = "cpu") -> dict[str, Tensor]:
    """Tensors with names that begin with `prefix`, by the rest of their names, float32.

    `source` is a checkpoint's directory or one file.

    Raises:
        ValueError: there are none, or it is not a safetensors file.
    """
    head: dict[str, Tensor] = {}
    for path in [source] if source.is_file() else sorted(source.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in [name for name in tensors.keys() if name.startswith(prefix)]:  # noqa: SIM118
                    tensor = tensors.get_tensor(name).float().to(device)
                    head[name.removeprefix(prefix)] = tensor
        except SafetensorError as error:
            raise ValueError(f"{path}: not a file of weights: {error}") from None
    if not head:
        raise ValueError(f"{source}: lacks the weights {prefix}*")
    return head


def network(tensors: Mapping[str, Tensor], layers: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """Linear layers by the beginnings of their tensors' names, with a ReLU between them.

    From [rows, inputs] to [rows, outputs].
    """
    weights = [(tensors[f"{name}weight"], tensors.get(f"{name}bias")) for name in layers]

    def outputs(states: Tensor) -> Tensor:
        for number, (weight, bias) in enumerate(weights):
            states = F.linear(F.relu(states) if number else states, weight, bias)
        return states

    return outputs
