"""From settings to an engine: which one, its device, weights and KV capacity."""

from __future__ import annotations

import importlib.util
import logging

import torch
from transformers.utils import logging as transformers_logging

from generator_service.budget import Budget, host_memory
from generator_service.engine.commands import OnStep
from generator_service.engine.engine import Engine
from generator_service.engine.generator import LocalGenerator
from generator_service.engine.model import CausalLM
from generator_service.engine.text import Text
from generator_service.engine.thread import EngineThread
from generator_service.settings import GeneratorSettings
from specrej import fingerprint
from specrej.contracts import GeneratorDescription, SlotGauge
from specrej_models.probe import examine

log = logging.getLogger(__name__)

# Rows of a pass on a CPU, unless one session has more: more rows cost their share of time, so that
# they only make other sessions wait (benchmarks/results/linear.json).
_ROWS_ON_CPU = 128


def device_of(setting: str) -> str:
    """The device of the setting, which may be "auto": CUDA if there is one."""
    if setting != "auto":
        return setting
    return "cuda" if torch.cuda.is_available() else "cpu"


def engine_of(settings: GeneratorSettings) -> str:
    """The engine of the settings; where it is left to the device, vLLM on CUDA, else the own one.

    Raises:
        RuntimeError: it is vLLM, which is not installed.
    """
    if settings.engine != "auto":
        return settings.engine
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


def load_generator(settings: GeneratorSettings, on_step: OnStep | None = None) -> LocalGenerator:
    """A generator on an engine that runs; takes seconds.

    `on_step` is called after every step, in the engine's thread.
    """
    transformers_logging.disable_progress_bar()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = device_of(settings.device)
    files = settings.files
    examined = examine(
        files.directory, tool_format=settings.tool_format, thinking_marks=settings.thinking_marks
    )
    model = CausalLM.load(examined, device)
    context_tokens = settings.context_of(model.sizes.context_tokens)
    dtype = str(model.shape.dtype).removeprefix("torch.")
    auto_candidates = settings.auto_candidates_of(device)
    capacity = settings.kv_slots or slots_from_memory(model, settings)
    engine = Engine(
        model,
        capacity,
        max_waiting=settings.max_waiting,
        auto_candidates=auto_candidates,
        prefill_chunk=settings.prefill_chunk,
        max_rows=min(settings.max_candidates, _ROWS_ON_CPU)
        if device == "cpu"
        else settings.max_candidates,
        prefix_cache_slots=int(capacity * settings.prefix_cache),
        on_step=on_step,
    )
    thread = EngineThread(engine)
    thread.start()
    card = GeneratorDescription(
        model=files.name,
        fingerprint=fingerprint.of_directory(files.directory, {"dtype": str(model.shape.dtype)}),
        context_tokens=context_tokens,
        max_candidates=settings.max_candidates,
        vocabulary=model.vocabulary,
        slot_bytes=model.shape.slot_bytes,
        device=f"{device} {dtype}",
        slots=SlotGauge(capacity, 0, 0),
        auto_candidates=auto_candidates,
        can_fork=True,
    )
    return LocalGenerator(thread, Text.of(examined), card)


def vllm_fingerprint(settings: GeneratorSettings, dtype: str, version: str) -> str:
    """Fingerprint of the weights and all that changes tokens, such as quantisation."""
    settings_of_engine: dict[str, object] = {"dtype": dtype, "engine": f"vllm {version}"}
    if settings.vllm_options:
        settings_of_engine["options"] = settings.vllm_options
    return fingerprint.of_directory(settings.files.directory, settings_of_engine)


def slots_from_memory(model: CausalLM, settings: GeneratorSettings) -> int:
    """Slots that fit the generator's share of the memory, less weights and workspace.

    The share is at most the free memory plus the weights: other processes may use the rest.

    Raises:
        ValueError: not even one fits.
    """
    device, weights = model.shape.device, model.weight_bytes
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else host_memory()
    budget = Budget(
        model.sizes,
        weights,
        min(int(total * settings.memory_fraction), free + weights),
        settings.context_of(model.sizes.context_tokens),
        settings.max_candidates,
        settings.prefill_chunk,
        device.type,
        threads=torch.get_num_threads() if model.is_compiled else 0,
    )
    log.info("memory: %d bytes in all, %s", total, budget)
    if budget.slots < 1:
        raise ValueError(
            f"no memory for KV slots: {budget.usable_bytes} bytes (memory_fraction "
            f"{settings.memory_fraction} of {total}) - {weights} for weights - "
            f"{budget.workspace_bytes} for a step of {settings.max_candidates} candidates; "
            "set memory_fraction higher, or max_candidates or context_tokens lower"
        )
    return budget.slots
