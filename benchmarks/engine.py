"""The own engine without services, for `benchmarks.worker`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from generator_service.engine.commands import OpenCommand
from generator_service.engine.thread import EngineThread
from specrej.contracts import Sampling


def products_seconds(products: Sequence[Any], rows: int) -> float:
    """The fastest of several passes through all matrix products of one step.

    Every layer has its own weights, so they are read from memory as in a step.
    """
    data = {size: torch.randn(1, rows, size) for size in {layer.in_features for layer in products}}
    passes: list[float] = []
    with torch.inference_mode():
        while len(passes) < 6 or sum(passes) < 1.0:
            started = time.perf_counter()
            for layer in products:
                layer(data[layer.in_features])
            passes.append(time.perf_counter() - started)
    return min(passes)


def generate(engine: EngineThread, prompt: Sequence[int], n: int, new_tokens: int) -> None:
    """Run one session to its end without cuts."""
    sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
    session, opened = engine.open(OpenCommand(prompt, n, sampling, 1))
    opened.result()
    batch = engine.extend(session, new_tokens).result()
    assert sum(prefix.num_new for prefix in batch.prefixes) == n * new_tokens
    engine.close(session).result()
