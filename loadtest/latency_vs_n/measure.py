"""Sends requests to the public API block by block and times them."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum

from loadtest.arrivals import LATE_S, poisson, send_open_loop
from specrej import Client
from specrej.client import Options
from specrej.contracts import Algorithm, CacheControl, Finished, Generation, RoundCompleted
from specrej.errors import SpecrejError
from specrej.status import to_status

GAVE_UP = "GAVE_UP"
# A request that ends with another code would end the same way in every later block.
_EXPECTED_CODES = ("OK", GAVE_UP, "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
# Most requests of one block, and how far the request numbers of two repeats are apart.
_MAX_REQUESTS = 8
_SATURATING_CANDIDATES = 128
_DRAIN_S = 60.0
_POLL_S = 0.05


class MeasurementError(Exception):
    """The service cannot be measured; the message is the reason."""


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


@dataclass(frozen=True, slots=True)
class Block:
    """The requests of one algorithm and one N that are sent together."""

    repeat: int
    condition: Condition
    algorithm: Algorithm
    n: int

    @property
    def num_requests(self) -> int:
        """Fewer where a request takes longer, so that one repeat takes about ten minutes."""
        match self.condition:
            case Condition.ALONE:
                return max(1, min(4, 64 // self.n))
            case Condition.STEADY:
                return 4
            case Condition.SATURATED:
                return max(2, min(_MAX_REQUESTS, _SATURATING_CANDIDATES // self.n))


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
    """A block's requests in the order of their numbers, and the seconds the block took."""

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


async def measure(client: Client, settings: Settings) -> AsyncGenerator[Measured]:
    """Every pair of blocks at least once, then more until the time is over.

    Raises:
        MeasurementError: the service does not take the largest N, or fails every request of a block
            for another reason than load.
        SpecrejError: the service cannot be reached.
    """
    most = (await client.describe()).generator.max_candidates
    if max(settings.ns) > most:
        raise MeasurementError(f"the service takes {most} candidates at most")
    driver = Driver(client, settings)
    for algorithm in Algorithm:  # warms up
        await driver.run(Block(0, Condition.SATURATED, algorithm, min(settings.ns)))
    ends = time.perf_counter() + settings.minutes * 60
    for pair in blocks(settings):
        if pair[0].repeat and time.perf_counter() > ends:
            return
        for block in pair:
            yield await driver.run(block)


class Driver:
    """Runs blocks against one service."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._settings = settings

    async def run(self, block: Block) -> Measured:
        """Send the requests of one block when the service is idle; wait for their ends.

        Raises:
            MeasurementError: no request was answered, for another reason than load.
        """
        await self._wait_until_idle()
        started = time.perf_counter()
        numbers = range(block.num_requests)
        match block.condition:
            case Condition.ALONE:
                requests = [await self._send(block, i, time.perf_counter()) for i in numbers]
            case Condition.STEADY:
                # Equal seeds: both algorithms and every N get the same arrivals.
                times_s = itertools.islice(poisson(self._settings.rate, block.repeat), len(numbers))
                requests = await send_open_loop(
                    lambda index, due: self._send(block, index, due), times_s
                )
            case Condition.SATURATED:
                requests = await asyncio.gather(
                    *(self._send(block, i, time.perf_counter()) for i in numbers)
                )
        codes = {request.code for request in requests}
        if "OK" not in codes and not codes <= set(_EXPECTED_CODES):
            raise MeasurementError(f"the service returns {', '.join(sorted(codes))}")
        return Measured(block, tuple(requests), time.perf_counter() - started)

    async def _send(self, block: Block, index: int, due: float) -> Request:
        number = block.repeat * _MAX_REQUESTS + index
        late_s = max(0.0, time.perf_counter() - due)
        first_round_s, generation, code = 0.0, None, "OK"
        patience_s = self._settings.patience_s if block.condition is Condition.STEADY else math.inf
        stream = self._client.stream(
            self._settings.prompts[number % len(self._settings.prompts)],
            **Options(
                n=block.n,
                alpha=self._settings.alpha,
                algorithm=block.algorithm,
                max_tokens=self._settings.max_tokens,
                seed=number + 1,
                cache=CacheControl.BYPASS,
            ),
        )
        try:
            timeout_s = patience_s - late_s if math.isfinite(patience_s) else None
            async with asyncio.timeout(timeout_s), aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, RoundCompleted) and not first_round_s:
                        first_round_s = time.perf_counter() - due
                    elif isinstance(event, Finished):
                        generation = event.generation
        except TimeoutError:
            code = GAVE_UP
        except SpecrejError as error:
            code = to_status(error)[0].name
        seconds = time.perf_counter() - due
        tokens, reward = _result(generation) if code == "OK" else (0, 0.0)
        return Request(number, code, late_s, seconds, first_round_s, tokens, reward)

    async def _wait_until_idle(self) -> None:
        """Cancelled requests may still run for a moment."""
        ends = time.perf_counter() + _DRAIN_S
        while time.perf_counter() < ends:
            service = await self._client.describe()
            if not service.running and not service.queued:
                return
            await asyncio.sleep(_POLL_S)


def _result(generation: Generation | None) -> tuple[int, float]:
    assert generation
    return generation.usage.generated_tokens, generation.best.score
