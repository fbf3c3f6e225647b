"""Which requests are sent, in which order, and how long that should take. Pure.

A *block* is what is measured in one go: some requests of one algorithm and one N, in one condition.
Blocks of the two algorithms follow each other at once, in turns; all else is shuffled within each
repeat, so that a machine that slows down, slows down everything alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from loadtest.sweep.settings import ALGORITHMS, Settings
from specrej.contracts import Algorithm


class Condition(Enum):
    """How requests follow each other."""

    ALONE = "alone"  # one at a time
    STEADY = "steady"  # at a fixed rate, as they please (Poisson), an open loop
    SATURATED = "saturated"  # users who ask again at once, enough to keep the service busy


# How many requests a block may have; at saturation, of each user. With six prompts and three
# repeats, even numbers ask every prompt equally often. Alone, two are the least: fewer than four in
# all repeats say nothing of how sure a comparison is.
_SIZES = {
    Condition.ALONE: (2, 4, 6, 8, 10, 12),
    Condition.STEADY: (3, 4, 6, 8, 10, 12, 16, 20, 24),
    Condition.SATURATED: (1, 2, 3, 4, 6, 8),
}
Sizes = dict[tuple[Condition, int], int]


@dataclass(frozen=True, slots=True)
class Block:
    """What is measured in one go."""

    repeat: int
    condition: Condition
    algorithm: Algorithm
    n: int
    num_requests: int = 0

    @property
    def key(self) -> str:
        """Its name, within a sweep."""
        return f"{self.repeat}/{self.condition.value}/{self.algorithm.value}/{self.n}"

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        names = {"condition": self.condition.value, "algorithm": self.algorithm.value}
        return asdict(self) | names

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Block:
        """The same again."""
        condition, algorithm = Condition(kept["condition"]), Algorithm(kept["algorithm"])
        return cls(**(kept | {"condition": condition, "algorithm": algorithm}))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a request that is alone, measured at some N; in between and beyond by a rule."""

    seconds: Mapping[Algorithm, Mapping[int, float]]

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            algorithm.value: {str(n): seconds for n, seconds in known.items()}
            for algorithm, known in self.seconds.items()
        }

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Costs:
        """The same again."""
        return cls(
            {
                Algorithm(name): {int(n): seconds for n, seconds in known.items()}
                for name, known in kept.items()
            }
        )

    def of(self, algorithm: Algorithm, n: int) -> float:
        """On a line between the nearest in log-log; beyond the last as much per candidate."""
        known = self.seconds[algorithm]
        below = max((each for each in known if each <= n), default=min(known))
        above = min((each for each in known if each >= n), default=0)
        if not above:
            return known[below] * n / below
        if above == below:
            return known[below]
        part = math.log(n / below) / math.log(above / below) if n > below else 0.0
        return math.exp((1 - part) * math.log(known[below]) + part * math.log(known[above]))


def plan(settings: Settings, costs: Costs) -> list[Block]:
    """All blocks in order, with as many requests as fit the minutes; none goes without.

    Both algorithms have as many. Where there are fewest requests, more are added first.
    """
    sizes = {
        (condition, n): _sizes(settings, condition, n)[0]
        for condition in Condition
        for n in settings.ns
    }
    while _grow(sizes, settings, costs):
        pass
    return _in_order(settings, sizes)


def _grow(sizes: Sizes, settings: Settings, costs: Costs) -> bool:
    """One step more where there are fewest; False where nothing fits any more."""
    left_s = settings.minutes * 60 - expected_s(_in_order(settings, sizes), settings, costs)
    for condition, n in sorted(sizes, key=lambda key: (sizes[key], key[1])):
        size = sizes[condition, n]
        larger = next((k for k in _sizes(settings, condition, n) if k > size), size)
        more_s = settings.repeats * sum(
            block_s(Block(0, condition, algorithm, n, larger), settings, costs)
            - block_s(Block(0, condition, algorithm, n, size), settings, costs)
            for algorithm in ALGORITHMS
        )
        if larger > size and more_s <= left_s:
            sizes[condition, n] = larger
            return True
    return False


def _sizes(settings: Settings, condition: Condition, n: int) -> list[int]:
    unit = settings.users(n) if condition is Condition.SATURATED else 1
    return [size * unit for size in _SIZES[condition]]


def expected_s(blocks: Iterable[Block], settings: Settings, costs: Costs) -> float:
    """Seconds that they should take together."""
    return sum(block_s(block, settings, costs) for block in blocks)


def block_s(block: Block, settings: Settings, costs: Costs) -> float:
    """Seconds that one should take."""
    k, alone_s = block.num_requests, costs.of(block.algorithm, block.n)
    users = settings.users(block.n)
    # Requests at once are about one request of all their candidates.
    together_s = costs.of(block.algorithm, block.n * users)
    match block.condition:
        case Condition.ALONE:
            return k * alone_s
        case Condition.SATURATED:
            return math.ceil(k / users) * together_s
    window_s = k / settings.rate
    return min(max(window_s, k * together_s / users) + alone_s, window_s + settings.patience_s)


def calibration_ns(ns: Iterable[int]) -> list[int]:
    """Where costs are measured beforehand: every other, none above 64 unless it is the first."""
    ordered = sorted(ns)
    small = [n for n in ordered if n <= 64] or ordered[:1]
    return sorted({*small[::2], small[-1]})


def _in_order(settings: Settings, sizes: Sizes) -> list[Block]:
    ordered = []
    for repeat in range(settings.repeats):
        pairs = list(sizes)
        random.Random(f"{settings.seed}/{repeat}").shuffle(pairs)
        for number, (condition, n) in enumerate(pairs):
            both = ALGORITHMS if (repeat + number) % 2 else ALGORITHMS[::-1]
            ordered += [
                Block(repeat, condition, algorithm, n, sizes[condition, n]) for algorithm in both
            ]
    return ordered
