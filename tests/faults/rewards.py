"""Rewards that misbehave, by the dotted paths that a `function` reward is declared with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from specrej.contracts import Prompt
from specrej.errors import Overloaded

_SLOW_S = 0.2
_kept: list[str] = []


def nan(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """Not a number, but for the warm-up."""
    return _well(texts) or [math.nan] * len(texts)


def inf(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """Infinity, but for the warm-up."""
    return _well(texts) or [math.inf] * len(texts)


def too_few(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """One score less than there are texts, but for the warm-up."""
    return _well(texts) or [1.0] * (len(texts) - 1)


def too_many(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """One score more than there are texts, but for the warm-up."""
    return _well(texts) or [1.0] * (len(texts) + 1)


def raising(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """A bug, but for the warm-up."""
    if not _well(texts):
        raise RuntimeError("secret: the reward was told to fail")
    return [0.0]


def exiting(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """Ends the thread it is called in, or tries to, but for the warm-up."""
    if not _well(texts):
        raise SystemExit("secret: the reward was told to leave")
    return [0.0]


def exhausted(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """Always too busy, but for the warm-up."""
    if not _well(texts):
        raise Overloaded("the reward is busy", retry_after_s=2)
    return [0.0]


def slow(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """Takes much longer than the toy, and says what the toy says of vowels in `a` alone."""
    time.sleep(0.0 if _well(texts) else _SLOW_S)
    return [text.count("a") / max(1, len(text)) for text in texts]


def leaky(prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """Keeps every text, many times over: the soak's positive control."""
    _kept.extend(text * 20 for text in texts)
    return [text.count("a") / max(1, len(text)) for text in texts]


def _well(texts: Sequence[str]) -> list[float]:
    """The scores of a worker's warm-up, which is no case; nothing for all other texts."""
    return [0.0] if list(texts) == ["Hello."] else []
