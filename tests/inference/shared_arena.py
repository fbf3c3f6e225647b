"""Repeats attention while another thread allocates memory from the same arena; prints the results.

Run it with MALLOC_ARENA_MAX=1: what a kernel has freed is then given to the other thread.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from generator_service.commands import OpenCommand, PrefixBatch
from generator_service.engine import Engine
from generator_service.model import CausalLM
from specrej.contracts import Sampling
from tests.generator_service import tiny

_RUNS = 5
_TOKENS = 24
# Floats: around what attention needs for its scores.
_SIZES = range(500, 8000, 500)


def _tokens(model: CausalLM) -> list[tuple[int, ...]]:
    engine = Engine(model, 2000)
    sampling = Sampling(max_tokens=_TOKENS, seed=3, ignore_eos=True)
    command = OpenCommand([*range(3, 60)], 6, sampling, _TOKENS)
    session = engine.open(engine.new_session(command))
    while engine.step() and not session.opened.done():
        pass
    growing = engine.extend(session.id, _TOKENS)
    while not growing.done():
        engine.step()
    batch: PrefixBatch = growing.result()
    return [prefix.token_ids for prefix in batch.prefixes]


def main() -> None:
    """Print the number of runs whose tokens differ from those before the other thread began."""
    torch.set_num_threads(2)
    model = CausalLM(tiny.build())
    expected, over = _tokens(model), threading.Event()

    def spoil() -> None:
        while not over.is_set():
            for size in _SIZES:
                np.full(size, np.nan, np.float32)
            time.sleep(0)  # or the engine waits for the interpreter at each of its operations

    spoiling = threading.Thread(target=spoil)
    spoiling.start()
    try:
        print(sum(_tokens(model) != expected for _ in range(_RUNS)))
    finally:
        over.set()
        spoiling.join()


if __name__ == "__main__":
    main()
