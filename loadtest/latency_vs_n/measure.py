"""What is measured: settings, blocks of requests in their order, and how each request ended. Does
not import Locust."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from loadtest.arrivals import LATE_S, poisson
from specrej.contracts import Algorithm

GAVE_UP = "GAVE_UP"
# How far the request numbers of two repeats are apart.
REPEAT_NUMBERS = 1_000_000
_SATURATING_CANDIDATES = 128
_MAX_SATURATING = 8  # requests
_STEADY_REQUESTS = 20  # that count, on average


class Condition(Enum):
    """How the requests of a block follow each other."""

    ALONE = "alone"  # one at a time
    STEADY = "steady"  # at a fixed mean rate, an open loop of Poisson arrivals
    SATURATED = "saturated"  # all at once, enough candidates to keep the service busy


@dataclass(frozen=True, slots=True)
class Settings:
    """What is sent."""

    prompts: tuple[str, ...]
    ns: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    minutes: float = 30.0  # no block begins later, except in the first repeat
    max_tokens: int = 128
    alpha: float = 0.5
    rate: float = 0.5  # arrivals per second when steady
    patience_s: float = 12.0  # a steady request is cancelled after this time
    slo_s: float = 10.0  # an answer within this time is in time

    def prompt(self, repeat: int, index: int) -> str:
        """The prompt of request `index` of a block; the repeats cycle through all prompts."""
        return self.prompts[(repeat + index) % len(self.prompts)]

    @property
    def window_s(self) -> float:
        """The part of a steady block in which due requests count."""
        return max(_STEADY_REQUESTS / self.rate, self.patience_s)

    def arrivals_s(self, repeat: int) -> tuple[float, ...]:
        """When the requests of a steady block are due, in seconds from its start.

        Those of the first `patience_s` seconds warm up, so that a queue can build before requests
        count. Equal for both algorithms and every N.

        Raises:
            ValueError: the rate is not positive.
        """
        due = poisson(self.rate, repeat)
        return tuple(itertools.takewhile(lambda at_s: at_s < self.patience_s + self.window_s, due))


@dataclass(frozen=True, slots=True)
class Block:
    """The requests of one algorithm and one N that are sent together."""

    repeat: int
    condition: Condition
    algorithm: Algorithm
    n: int

    @property
    def num_requests(self) -> int:
        """Of a block that is not steady; fewer where a request takes longer."""
        if self.condition is Condition.ALONE:
            return max(1, min(4, 64 // self.n))
        return max(2, min(_MAX_SATURATING, _SATURATING_CANDIDATES // self.n))


@dataclass(frozen=True, slots=True)
class Request:
    """One request and how it ended; times are in seconds since it was due.

    `code` is a gRPC status name or GAVE_UP. Fields of the answer are 0 without an answer. `number`
    decides prompt and seed: requests with equal numbers are comparable.
    """

    number: int
    code: str
    late_s: float
    seconds: float
    first_round_s: float = 0.0
    tokens: int = 0  # generated, of all candidates
    reward: float = 0.0

    @property
    def latency_s(self) -> float:
        """Infinite without an answer, so that failures never lower a percentile."""
        return self.seconds if self.code == "OK" else math.inf


@dataclass(frozen=True, slots=True)
class Measured:
    """A block's requests that count, in the order of their numbers, and the seconds for them."""

    block: Block
    requests: tuple[Request, ...]
    wall_s: float

    @property
    def num_late(self) -> int:
        return sum(request.late_s > LATE_S for request in self.requests)


def blocks(settings: Settings) -> Iterator[tuple[Block, Block]]:
    """Endless pairs of blocks that differ in the algorithm only, in a random order per repeat.

    The algorithm that goes first alternates, so that a drift of the machine's speed meets both.
    """
    for repeat in itertools.count():
        cells = list(itertools.product(Condition, settings.ns))
        random.Random(repeat).shuffle(cells)
        for number, (condition, n) in enumerate(cells):
            first, second = (Block(repeat, condition, algorithm, n) for algorithm in Algorithm)
            yield (first, second) if (repeat + number) % 2 else (second, first)
