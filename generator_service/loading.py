"""From settings to a running engine: device, weights, KV capacity, one warm-up round."""

from __future__ import annotations

import os

import torch
from transformers.utils import logging as transformers_logging

from generator_service.engine import Engine, OpenCommand
from generator_service.local import LocalGenerator, ModelCard
from generator_service.model import CausalLM
from generator_service.settings import GeneratorSettings
from generator_service.text import Text
from specrej import fingerprint
from specrej.contracts import Sampling


def load_generator(settings: GeneratorSettings) -> LocalGenerator:
    """A generator whose engine runs and has made its first tokens; takes seconds."""
    transformers_logging.disable_progress_bar()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = _device(settings.device)
    model = CausalLM.load(settings.model_directory, device)
    engine = Engine(
        model,
        settings.kv_slots or slots_from_memory(model, settings.memory_fraction),
        max_waiting=settings.max_waiting,
        auto_candidates=min(settings.auto_candidates, settings.max_candidates),
        prefill_chunk=settings.prefill_chunk,
    )
    engine.start()
    _warm_up(engine)
    card = ModelCard(
        name=settings.model_directory.resolve().name,
        fingerprint=fingerprint.of_directory(
            settings.model_directory, {"dtype": str(model.shape.dtype)}
        ),
        context_tokens=model.context_tokens,
        max_candidates=settings.max_candidates,
        vocabulary=model.vocabulary,
        slot_bytes=model.shape.slot_bytes,
        device=f"{device} {str(model.shape.dtype).removeprefix('torch.')}",
    )
    return LocalGenerator(engine, Text.load(settings.model_directory, model.eos_ids), card)


def slots_from_memory(model: CausalLM, fraction: float) -> int:
    """Slots that fit a fraction of the memory that is free once the weights are loaded."""
    device = model.shape.device
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, int(free_bytes * fraction) // model.shape.slot_bytes)


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def _warm_up(engine: Engine) -> None:
    """A few tokens, so that the first request does not pay for first-time work."""
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    session_id, opened = engine.open(OpenCommand([0] * 8, 2, sampling, 1))
    opened.result()
    engine.extend(session_id, 2).result()
    engine.close(session_id).result()
