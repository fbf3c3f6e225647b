"""Repeats attention while another thread allocates memory from the same arena; prints the results.

Run it with MALLOC_ARENA_MAX=1: what a kernel has freed is then given to the other thread.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from tests.generator_service.stepping import alone

_RUNS = 5
_PROMPT = range(3, 60)
# Floats: around what attention needs for its scores.
_SIZES = range(500, 8000, 500)


def main() -> None:
    """Print the number of runs whose tokens differ from those before the other thread began."""
    torch.set_num_threads(2)
    expected, over = alone(_PROMPT, n=6), threading.Event()

    def spoil() -> None:
        while not over.is_set():
            for size in _SIZES:
                np.full(size, np.nan, np.float32)
            time.sleep(0)  # or the engine waits for the interpreter at each of its operations

    spoiling = threading.Thread(target=spoil)
    spoiling.start()
    try:
        print(sum(alone(_PROMPT, n=6) != expected for _ in range(_RUNS)))
    finally:
        over.set()
        spoiling.join()


if __name__ == "__main__":
    main()
