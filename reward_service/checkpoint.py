"""Weights from a local directory: the backbone by transformers, heads by their tensors' names.

Heads are not loaded by transformers: it fills missing ones with random numbers, and for those of
several layers the class exists only in code that comes with the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel

from reward_service.specs import LocalSpec, Resources
from specrej_models.model import bound_positions
from specrej_models.probe import load_config, load_weights, one_sentence, weights_of

# The tensor in the file of a head that `training` writes, [hidden].
HEAD_TENSOR = "head"


def load_model(
    spec: LocalSpec, resources: Resources, *, heads: Collection[str] = ()
) -> PreTrainedModel:
    """A model without its head, with all its weights; float32 on the CPU.

    Sets torch's thread count, which belongs to the thread that sets it. heads: beginnings of the
    names of the tensors that the reward reads itself.

    Raises:
        OSError, ValueError: as `load_config` and `load_weights`.
    """
    if resources.threads:
        torch.set_num_threads(resources.threads)
    load_config(spec.directory)
    model = load_weights(
        AutoModel,
        spec.directory,
        spare=heads,
        dtype=torch.float32 if resources.device == "cpu" else "auto",
    )
    bound_positions(model.config.get_text_config())
    loaded: PreTrainedModel = model.to(resources.device)
    return loaded


def load_head(source: Path, name: str, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a module by their names in it, or the tensor of that name by "", float32.

    `source` is a checkpoint's directory or one file.

    Raises:
        ValueError: there are none, or it is not a safetensors file.
    """
    head: dict[str, Tensor] = {}
    parts: set[str] = set()
    for path in [source] if source.is_file() else weights_of(source):
        with one_sentence(str(path)), safe_open(path, framework="pt") as tensors:
            keys: list[str] = list(tensors.keys())
            parts |= {key.split(".")[0] for key in keys}
            for key in [key for key in keys if f"{key}.".startswith(f"{name}.")]:
                head[key[len(name) + 1 :]] = tensors.get_tensor(key).float().to(device)
    if not head:
        raise ValueError(f"{source}: lacks the weights {name}, has {', '.join(sorted(parts))}")
    return head


class Network:
    """Linear layers with a ReLU between them, from [rows, num_inputs] to [rows, num_outputs]."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """tensors: of a head, see `load_head`: of one layer, or of numbered ones, alone.

        Raises:
            ValueError: they are not such layers.
        """
        if "" in tensors:  # one layer without a bias, [outputs, inputs] or [inputs]
            tensors = {"weight": tensors[""].reshape(-1, tensors[""].shape[-1])}
        numbers = {int(name.split(".")[0]) for name in tensors if name.split(".")[0].isdecimal()}
        names = [f"{number}." for number in sorted(numbers)] or [""]
        needed = {f"{name}weight" for name in names}
        if needed - tensors.keys() or tensors.keys() - needed - {f"{name}bias" for name in names}:
            listed = ", ".join(sorted(tensors)[:6])
            raise ValueError(f"must be a linear layer or numbered ones, has {listed}")
        self._layers = [(tensors[f"{n}weight"], tensors.get(f"{n}bias")) for n in names]
        weights = [weight for weight, _ in self._layers]
        if any(weight.dim() != 2 for weight in weights) or any(
            len(first) != second.shape[1] for first, second in pairwise(weights)
        ):
            shapes = ", ".join(str([*weight.shape]) for weight in weights)
            raise ValueError(f"the head's layers do not fit each other: {shapes}")
        self.num_inputs, self.num_outputs = weights[0].shape[1], len(weights[-1])

    def __call__(self, states: Tensor) -> Tensor:
        states = states.float()
        for number, (weight, bias) in enumerate(self._layers):
            states = F.linear(F.relu(states) if number else states, weight, bias)
        return states


def check_labels(directory: Path, label: int | None, num_labels: int) -> None:
    """Raises ValueError unless the label is there, or there is one and `label` is None."""
    if (label or 0) >= num_labels or (label is None and num_labels > 1):
        raise ValueError(f"{directory}: has {num_labels} labels, label must be the index of one")
