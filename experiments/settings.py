"""Settings of a collection. They are stored with it and must be equal when it is resumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specrej.contracts import Sampling

_FIRST = 8  # scores of shorter prefixes predict little
_PER_DOUBLING = 4


def default_grid(max_tokens: int) -> tuple[int, ...]:
    """8, 10, 12, 14, 16, 20, ...: four positions per doubling, and `max_tokens`."""
    positions = {max_tokens}
    start = _FIRST
    while start < max_tokens:
        positions |= {start + start * step // _PER_DOUBLING for step in range(_PER_DOUBLING)}
        start *= 2
    return tuple(sorted(position for position in positions if position <= max_tokens))


@dataclass(frozen=True, slots=True)
class Settings:
    """How candidates are generated and scored.

    n: candidates per prompt. grid: token positions at which prefixes are scored, the last one
    `max_tokens`. Prompt number i of a file is answered with seed `seed + i`.

    Raises:
        ValueError: the grid, n or max_tokens is out of range.
    """

    n: int = 512
    max_tokens: int = 128
    grid: tuple[int, ...] = default_grid(128)
    rewards: tuple[str, ...] = ("relevance",)
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError("n and max_tokens must be at least 1")
        if list(self.grid) != sorted(set(self.grid)) or self.grid[:1] < (1,):
            raise ValueError("the grid must have ascending positions from 1 on, each once")
        if self.grid[-1] != self.max_tokens:
            raise ValueError(f"the grid must end at max_tokens, {self.max_tokens}")

    def sampling(self, number: int) -> Sampling:
        """Sampling of prompt `number` of its file."""
        return Sampling(
            self.max_tokens,
            temperature=self.temperature,
            stop=self.stop,
            seed=self.seed + number,
            logprobs=True,
        )

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Settings:
        """The settings from their fields as JSON, in which tuples are lists."""
        tuples = {name: tuple(stored[name]) for name in ("grid", "rewards", "stop")}
        return cls(**(stored | tuples))
