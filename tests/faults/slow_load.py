"""A model load that never ends; as a program, the generator service with that load."""

from __future__ import annotations

from typing import NoReturn

import torch

from generator_service import loading
from generator_service.__main__ import main


def load(*_: object) -> NoReturn:
    """Run torch operations, during which the exit of the interpreter aborts the process."""
    while True:
        torch.tanh(torch.zeros(64, 64))


def __getattr__(name: str) -> NoReturn:
    """Load a reward that is a function of this module."""
    load()


if __name__ == "__main__":
    loading.load_generator = load  # type: ignore[assignment]
    main()
