"""The device of a generator, and the engine for it. Independent of both engines."""

from __future__ import annotations

import importlib.util

import torch

from generator_service.settings import GeneratorSettings


def device_of(setting: str) -> str:
    """The device of the setting, which may be "auto": CUDA if there is one."""
    if setting != "auto":
        return setting
    return "cuda" if torch.cuda.is_available() else "cpu"


def engine_of(settings: GeneratorSettings) -> str:
    """The engine where it is left to the device: vLLM on CUDA, the own one on CPUs.

    Raises:
        RuntimeError: it is vLLM, which is not installed.
    """
    if device_of(settings.device) == "cpu":
        return "own"
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError(
            "the engine on CUDA is vLLM, which is not installed:"
            " pip install 'specrej-server[models,vllm]' in an environment of its own, or set"
            " SPECREJ_GENERATOR_ENGINE=own for a reference"
            " that is not tuned for GPUs"
        )
    return "vllm"
