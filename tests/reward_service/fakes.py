"""Rewards with one property each; all survive the worker's warm-up."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from reward_service.reward import Reward, Task
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.contracts.errors import InvalidRequest


class FixedReward(Reward):
    """Returns `values` for any batch, after the warm-up."""

    fingerprint, description = "f", "Fixed values."

    def __init__(self, values: Sequence[float], name: str = "fixed") -> None:
        self.name = name
        self._values: Sequence[float] = (0.0,)
        self._next = values

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        values, self._values = self._values, self._next
        return Scores(tuple(values))


class FinishedReward(Reward):
    """1 for texts that ended by themselves, 0 for others."""

    name, fingerprint, description = "finished", "f", "Whether it ended."

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(float(c.finish is FinishReason.STOP) for c in candidates), 7)


class PiecewiseReward(Reward):
    """Computes letters, `token_budget` of them per pass; a pass with a "!" in it fails.
    The text "?" is refused.

    Records its passes after the warm-up; each waits for `gate`.
    """

    name, fingerprint, description = "piecewise", "f", "Letter by letter."

    def __init__(self, token_budget: int = 4) -> None:
        self.token_budget = token_budget
        self.passes: list[str] = []
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.num_freed = 0

    def begin(self, session: Prompt, candidates: Sequence[Candidate]) -> Task:
        texts = [candidate.text for candidate in candidates]
        if "?" in texts:
            raise InvalidRequest([])
        computed: list[str] = []

        def finish(num_tokens: int) -> Scores:
            return self.finish((float(len(computed)),) * len(texts), num_tokens)

        is_warm_up = texts == ["Hello."]
        letters = "" if is_warm_up else "".join(texts)
        return Task([(1, (computed, letter)) for letter in letters], finish)

    def finish(self, values: tuple[float, ...], num_tokens: int) -> Scores:
        return Scores(values, num_tokens)

    def free(self, session: Prompt) -> None:
        self.num_freed += 1

    def compute(self, pieces: Sequence[tuple[list[str], str]]) -> None:
        letters = "".join(letter for _, letter in pieces)
        self.entered.release()
        assert self.gate.acquire(timeout=30)
        self.passes.append(letters)
        if "!" in letters:
            raise ValueError("a bad letter")
        for computed, letter in pieces:
            computed.append(letter)
