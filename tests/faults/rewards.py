"""Functions for rewards of kind `function` that misbehave, except in the warm-up."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence

from specrej.contracts import Prompt

Score = Callable[[Prompt, Sequence[str]], list[float]]
_kept: list[str] = []


def _misbehaving(scores: Callable[[Sequence[str]], list[float]]) -> Score:
    """Return a reward with these scores for all texts but those of a worker's warm-up."""
    return lambda _, texts: [0.0] if list(texts) == ["Hello."] else scores(texts)


def _shares(texts: Sequence[str]) -> list[float]:
    """Return the share of the letter a in each text."""
    return [text.count("a") / max(1, len(text)) for text in texts]


def leaky(_: Prompt, texts: Sequence[str]) -> list[float]:
    """Keep every text many times: the soak's positive control."""
    _kept.extend(text * 20 for text in texts)
    return _shares(texts)


def slow(_: Prompt, texts: Sequence[str]) -> list[float]:
    """Take a second."""
    time.sleep(1)
    return _shares(texts)


nan = _misbehaving(lambda texts: [math.nan] * len(texts))
exiting = _misbehaving(lambda _: sys.exit("secret: the reward exits"))  # ends a thread
