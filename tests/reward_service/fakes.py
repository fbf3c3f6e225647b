"""Rewards that misbehave in one way each; all survive the worker's warm-up."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from specrej.contracts import Prompt, Scores


class FixedReward:
    """Returns `values` whatever it is asked, after the warm-up."""

    fingerprint = "f"
    description = "Fixed values."

    def __init__(self, values: Sequence[float], name: str = "fixed") -> None:
        self.name = name
        self._values: Sequence[float] = (0.0,)
        self._next = values

    def score(self, prompt: Prompt, texts: Sequence[str]) -> Scores:
        values, self._values = self._values, self._next
        return Scores(tuple(values))


class GatedReward:
    """Blocks its thread until `gate` is set, after the warm-up; remembers what it was asked."""

    fingerprint = "f"
    description = "Waits."

    def __init__(self, name: str = "gated") -> None:
        self.name = name
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.seen: list[str] = []
        self._warm = False

    def score(self, prompt: Prompt, texts: Sequence[str]) -> Scores:
        if self._warm:
            self.seen.extend(texts)
            self.entered.set()
            assert self.gate.wait(30)
        self._warm = True
        return Scores(tuple(0.0 for _ in texts))
