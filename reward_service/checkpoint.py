"""Weights of rewards from a local directory, by transformers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from reward_service.specs import LocalSpec, Resources
from specrej_models.model import bound_positions
from specrej_models.probe import load_config, load_weights


def load_model(
    spec: LocalSpec,
    resources: Resources,
    auto_class: Any = AutoModel,
    *,
    spare: Collection[str] = (),
) -> PreTrainedModel:
    """A model by one of transformers' Auto classes, with all its weights; float32 on the CPU.

    Sets torch's thread count, which belongs to the thread that sets it. spare: as `load_weights`.

    Raises:
        OSError, ValueError: as `load_config` and `load_weights`.
    """
    if resources.threads:
        torch.set_num_threads(resources.threads)
    load_config(spec.directory)
    dtype = torch.float32 if resources.device == "cpu" else "auto"
    model = load_weights(auto_class, spec.directory, spare=spare, dtype=dtype)
    bound_positions(model.config.get_text_config())
    loaded: PreTrainedModel = model.to(resources.device)
    return loaded
