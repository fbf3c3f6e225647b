"""Rewards with one property each; all survive the worker's warm-up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from reward_service.reward import WholeBatchReward
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.contracts.errors import InvalidRequest


class FixedReward(WholeBatchReward):
    """Returns `values` for any batch, after the warm-up."""

    def __init__(self, values: Sequence[float], name: str = "fixed") -> None:
        super().__init__(name, "f", "Fixed values.")
        self._values: Sequence[float] = (0.0,)
        self._next = values

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        values, self._values = self._values, self._next
        return Scores(tuple(values))


class FinishedReward(WholeBatchReward):
    """1 for texts that ended by themselves, 0 for others."""

    def __init__(self) -> None:
        super().__init__("finished", "f", "Whether it ended.")

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(float(c.finish is FinishReason.STOP) for c in candidates), 7)


class GatedReward(WholeBatchReward):
    """Blocks its thread until `gate` is set, after the warm-up; records the texts."""

    def __init__(self, name: str = "gated") -> None:
        super().__init__(name, "f", "Waits.")
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.seen: list[str] = []
        self._warm = False

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        if self._warm:
            self.seen.extend(candidate.text for candidate in candidates)
            self.entered.set()
            assert self.gate.wait(30)
        self._warm = True
        return Scores(tuple(0.0 for _ in candidates))


@dataclass(eq=False)
class PieceTask:
    """One piece of one token for each letter of each text."""

    letters: list[str]
    num_texts: int
    computed: list[str] = field(default_factory=list)

    @property
    def next_tokens(self) -> int:
        return 1 if self.letters else 0

    def take(self) -> tuple[PieceTask, str]:
        return self, self.letters.pop(0)

    def scores(self) -> Scores:
        return Scores((float(len(self.computed)),) * self.num_texts, len(self.computed))


class PiecewiseReward:
    """Computes letters, `token_budget` of them per pass; a pass with a "!" in it fails.
    The text "?" is refused.

    Records its passes; each pass after the warm-up waits for `gate`.
    """

    name = "piecewise"
    fingerprint = "f"
    description = "Letter by letter."

    def __init__(self, token_budget: int = 4) -> None:
        self.token_budget = token_budget
        self.passes: list[str] = []
        self.gate = threading.Semaphore(1)  # for the warm-up
        self.entered = threading.Semaphore(0)
        self.num_closed = 0

    def open(self, prompt: Prompt, *, once: bool = False) -> PiecewiseReward:
        return self

    def begin(self, candidates: Sequence[Candidate]) -> PieceTask:
        texts = [candidate.text for candidate in candidates]
        if "?" in texts:
            raise InvalidRequest([])
        if texts == ["Hello."]:
            return PieceTask(["H"], 1)
        return PieceTask(list("".join(texts)), len(texts))

    def close(self) -> None:
        self.num_closed += 1

    def compute(self, pieces: Sequence[tuple[PieceTask, str]]) -> None:
        letters = "".join(letter for _, letter in pieces)
        self.entered.release()
        assert self.gate.acquire(timeout=30)
        self.passes.append(letters)
        if "!" in letters:
            raise ValueError("a bad letter")
        for task, letter in pieces:
            task.computed.append(letter)
