"""A reward whose module takes its time to load."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specrej.contracts import Prompt

time.sleep(3)


def score(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """How many there are."""
    return [float(len(texts))] * len(texts)
