"""What a collection is made of: kept with it, so that a second start goes on with the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specrej.contracts import Sampling

_FIRST = 8  # shorter prefixes tell little
_PER_OCTAVE = 4


def default_grid(max_tokens: int) -> tuple[int, ...]:
    """8, 10, 12, 14, 16, 20, ... four positions until each doubling, the last one `max_tokens`."""
    positions = {max_tokens}
    octave = _FIRST
    while octave < max_tokens:
        steps = range(_PER_OCTAVE)
        positions |= {octave + octave * step // _PER_OCTAVE for step in steps}
        octave *= 2
    return tuple(sorted(each for each in positions if each <= max_tokens))


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides what is written and scored; the prompts are kept with their answers.

    n: candidates per prompt. grid: token positions at which prefixes are scored, the last one
    `max_tokens`. Prompt number i of a file is answered with seed `seed + i`.
    """

    n: int = 512
    max_tokens: int = 128
    grid: tuple[int, ...] = default_grid(128)
    rewards: tuple[str, ...] = ("relevance",)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError: says what is wrong."""
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError("there must be a candidate and a token")
        if list(self.grid) != sorted(set(self.grid)) or self.grid[:1] < (1,):
            raise ValueError("the grid must have ascending positions from 1 on, each once")
        if self.grid[-1] != self.max_tokens:
            raise ValueError(f"the grid must end at {self.max_tokens}, where answers do")

    def sampling(self, number: int) -> Sampling:
        """How prompt `number` of its file is answered."""
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=self.stop,
            seed=self.seed + number,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=True,
        )

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        lists = {name: list(getattr(self, name)) for name in ("grid", "rewards", "stop")}
        return asdict(self) | lists

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Settings:
        """The same again."""
        tuples = {name: tuple(kept[name]) for name in ("grid", "rewards", "stop")}
        return cls(**(kept | tuples))
