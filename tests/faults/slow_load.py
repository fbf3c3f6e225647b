"""A load that never ends; as a program, the generator service as it ships, but that it loads so."""

from __future__ import annotations

from typing import NoReturn

import torch

from generator_service import loading
from generator_service.__main__ import main


def load(*_: object) -> NoReturn:
    """In torch, in which a thread aborts the process whose interpreter ends before it."""
    while True:
        torch.tanh(torch.zeros(64, 64))


if __name__ == "__main__":
    loading.load_generator = load  # type: ignore[assignment]
    main()
