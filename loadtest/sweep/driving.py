"""Sends a block's requests through the public API and times them, on one event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

from loadtest.arrivals import LATE_S, poisson
from loadtest.sweep.journal import Line, Request, RoundSeen
from loadtest.sweep.plan import Block, Condition
from loadtest.sweep.settings import ALGORITHMS, Settings
from specrej import Client, FinishReason
from specrej.client import Options
from specrej.contracts import (
    Algorithm,
    CacheControl,
    Finished,
    Generation,
    RoundCompleted,
    Schedule,
)
from specrej.errors import SpecrejError
from specrej.status import to_status

GAVE_UP = "GAVE_UP"
SLOTS = "slots"  # the block of `watch_slots`
_WATCHED_ROUNDS = 16
_DRAIN_S = 60.0
_POLL_S = 0.05


class Driver:
    """Of one service; what others ask of it meanwhile is measured along."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._settings = settings

    async def run(self, block: Block) -> tuple[list[Request], Line]:
        """All requests of a block, in the order in which they were due, and what is known of it."""
        await self._drained()
        began = time.perf_counter()
        match block.condition:
            case Condition.ALONE:
                requests = [await self._ask(block, i, began) for i in range(block.num_requests)]
            case Condition.STEADY:
                requests = await self._steady(block, began)
            case Condition.SATURATED:
                requests = await self._saturated(block, began)
        return requests, {
            "block": block.key,
            "size": len(requests),
            "wall_s": time.perf_counter() - began,
            "late": sum(request.late_s > LATE_S for request in requests),
        }

    async def watch_slots(self, n: int) -> tuple[list[Request], Line]:
        """One request of each algorithm, of the same prompt and seed, for their slots over time.

        Best-of-N has one round only, at whose end all slots are free again. So it is asked for as
        many rounds as show its growth, which reject nobody and, ranked by likelihood, cost nothing.
        """
        await self._drained()
        began = time.perf_counter()
        step = max(1, self._settings.max_tokens // _WATCHED_ROUNDS)
        decisions = tuple(range(step, self._settings.max_tokens, step))
        requests = []
        for algorithm in ALGORITHMS:
            block = Block(0, Condition.ALONE, algorithm, n, 1)
            options = self._options(block, 0)
            if algorithm is Algorithm.BEST_OF_N:
                options |= Options(
                    algorithm=Algorithm.SPECULATIVE_REJECTION,
                    alpha=0.0,
                    schedule=Schedule("tokens", decisions),
                    rewards={"likelihood": 1.0},
                )
            requests.append(replace(await self._ask(block, 0, began, options=options), block=SLOTS))
        return requests, {"block": SLOTS, "size": len(requests), "n": n}

    async def _steady(self, block: Block, began: float) -> list[Request]:
        tasks = []
        # Both algorithms, and every N, meet the same arrivals.
        arrivals = poisson(self._settings.rate, f"{self._settings.seed}/{block.repeat}")
        for index, at_s in zip(range(block.num_requests), arrivals, strict=False):
            # The clock that counts is the schedule's, however late this loop wakes up.
            await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self._ask(block, index, began, at_s)))
        return list(await asyncio.gather(*tasks))

    async def _saturated(self, block: Block, began: float) -> list[Request]:
        indices = iter(range(block.num_requests))
        users = range(self._settings.users(block.n))
        lists = await asyncio.gather(*(self._user(block, indices, began) for _ in users))
        return sorted(itertools.chain(*lists), key=lambda request: request.due_s)

    async def _user(self, block: Block, indices: Iterator[int], began: float) -> list[Request]:
        return [await self._ask(block, index, began) for index in indices]

    async def _ask(
        self,
        block: Block,
        index: int,
        began: float,
        at_s: float | None = None,
        options: Options | None = None,
    ) -> Request:
        """One request, due `at_s` after `began`, or now."""
        due = time.perf_counter() if at_s is None else began + at_s
        patience_s = self._settings.patience_s if block.condition is Condition.STEADY else None
        watch = _Watch(due)
        code = "OK"
        try:
            async with asyncio.timeout(patience_s and patience_s - watch.late_s):
                await self._follow(block, index, watch, options or self._options(block, index))
        except TimeoutError:
            code = GAVE_UP
        except SpecrejError as error:
            code = to_status(error)[0].name
        return watch.request(block, self._prompt(block, index), _seed(block, index), began, code)

    async def _follow(self, block: Block, index: int, watch: _Watch, options: Options) -> None:
        prompt = self._settings.prompts[self._prompt(block, index)]
        stream = self._client.stream(prompt, **options)
        async with aclosing(stream) as events:
            async for event in events:
                watch.saw(event)

    def _prompt(self, block: Block, index: int) -> int:
        """By turns, over all repeats."""
        return (block.repeat * block.num_requests + index) % len(self._settings.prompts)

    def _options(self, block: Block, index: int) -> Options:
        return Options(
            n=block.n,
            alpha=self._settings.alpha,
            algorithm=block.algorithm,
            max_tokens=self._settings.max_tokens,
            seed=_seed(block, index),
            cache=CacheControl.BYPASS,
        )

    async def _drained(self) -> None:
        """Until nothing runs; whoever gave up may still be on the way out."""
        ends = time.perf_counter() + _DRAIN_S
        while time.perf_counter() < ends:
            service = await self._client.describe()
            if not service.running and not service.queued:
                return
            await asyncio.sleep(_POLL_S)


def _seed(block: Block, index: int) -> int:
    """The same for both algorithms and every N."""
    return block.repeat * 1000 + index + 1


class _Watch:
    """What is seen of one request, from when it was due."""

    def __init__(self, due: float) -> None:
        self._due = due
        self.late_s = max(0.0, time.perf_counter() - due)
        self._rounds: list[RoundSeen] = []
        self._generation: Generation | None = None
        self._seconds = 0.0

    def saw(self, event: object) -> None:
        """Note the time, and what the event says."""
        now_s = time.perf_counter() - self._due
        if isinstance(event, RoundCompleted):
            trace = event.trace
            self._rounds.append(
                RoundSeen(
                    now_s,
                    trace.decision_token,
                    trace.num_live,
                    trace.session_slots,
                    trace.freed_slots,
                    trace.capacity_slots,
                )
            )
        if isinstance(event, Finished):
            self._generation, self._seconds = event.generation, now_s

    def request(self, block: Block, prompt: int, seed: int, began: float, code: str) -> Request:
        """What became of it."""
        seen = Request(
            block=block.key,
            n=block.n,
            prompt=prompt,
            seed=seed,
            due_s=self._due - began,
            late_s=self.late_s,
            code=code,
            seconds=time.perf_counter() - self._due,
            first_round_s=self._rounds[0].at_s if self._rounds else 0.0,
            rounds=tuple(self._rounds),
        )
        if code != "OK" or self._generation is None:
            return seen
        return _answered(seen, self._generation, self._seconds)


def _answered(seen: Request, answer: Generation, seconds: float) -> Request:
    return replace(
        seen,
        seconds=seconds,
        prompt_tokens=answer.usage.prompt_tokens,
        tokens=answer.usage.generated_tokens,
        reward=answer.best.score,
        complete=answer.best.finish is FinishReason.STOP,
        answer_tokens=answer.best.num_tokens,
        score_s=answer.timings.score_ms / 1e3,
    )
