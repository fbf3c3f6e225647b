"""A reward whose module is never loaded."""

from __future__ import annotations

from collections.abc import Sequence

from specrej.contracts import Prompt
from tests.faults.slow_load import load

load()


def score(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """How many there are."""
    return [float(len(texts))] * len(texts)
