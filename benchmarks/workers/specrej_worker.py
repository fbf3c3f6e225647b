"""The own engine, and the bound that its matrix products set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.engine import generate, products_seconds
from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from generator_service.engine.thread import EngineThread


class Worker:
    """One engine for all requests; `slots`: of the largest request."""

    def __init__(self, model: str, threads: int, slots: int) -> None:
        torch.set_num_threads(threads)
        self.versions = {"specrej": version("specrej"), "torch": torch.__version__}
        self._model = CausalLM.load(Path(model), "cpu")
        self._engine = EngineThread(Engine(self._model, slots))
        self._engine.start()

    def measure(
        self,
        n: int = 0,
        prompt_ids: Sequence[int] = (),
        new_tokens: int = 0,
        gemm_bound: int = 0,
    ) -> float:
        """Seconds for n candidates, or for the products of one step of `gemm_bound` rows."""
        if gemm_bound:
            return products_seconds(self._model.products, gemm_bound)
        started = time.perf_counter()
        generate(self._engine, prompt_ids, n, new_tokens)
        return time.perf_counter() - started
