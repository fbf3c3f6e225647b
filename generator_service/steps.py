"""What can be seen of a generator at work: numbers, for whoever counts them. Standard library only,
and the contract's values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specrej.contracts import SlotGauge


@dataclass(frozen=True, slots=True)
class Load:
    """Slots and sessions at a moment; `waiting`: for slots."""

    slots: SlotGauge
    sessions: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: how long it took, the candidates in it, and the tokens that came of it.

    `reused`: prompt tokens of sessions admitted since the last step that others had left, or were
    reading already.
    """

    seconds: float
    rows: int
    generated: int = 0
    prefilled: int = 0
    reused: int = 0


OnStep = Callable[[Step], None]


@dataclass(slots=True)
class Tally:
    """Tokens since the last step."""

    generated: int = 0
    prefilled: int = 0
    reused: int = 0

    def step(self, seconds: float, rows: int) -> Step:
        """As of the end of a step."""
        return Step(seconds, rows, self.generated, self.prefilled, self.reused)
