"""An event loop on virtual time: no sockets, no threads, no sleeping; its order is the seed's."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any
from unittest import mock

from orchestrator.loop import run

EPOCH_S = 1.8e9  # the wall clock at the start


class Violation(AssertionError):
    """An invariant does not hold."""


class VirtualLoop(asyncio.BaseEventLoop):
    """When nothing is ready, its time jumps to the next timer.

    With `shuffles`, callbacks that are ready together run in an order drawn from `rng`, else in
    the order in which they became ready. `after_turn` is called after each turn.
    """

    now_s = 0.0
    num_turns = 0

    def __init__(self, rng: random.Random, *, shuffles: bool) -> None:
        super().__init__()
        self._shuffle = rng.shuffle if shuffles else lambda batch: None
        self._ready: Any  # of the base class
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()  # of timers, in the order of their creation
        self.after_turn: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, **context: Any
    ) -> Any:
        """A timer; the base class compares timers in Python, and in no certain order if equal."""
        timer = asyncio.TimerHandle(when, callback, args, self, **context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        """Keep no set of all generators: none is left at the end, as no task is."""

    def run_in_executor(self, _: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Call `func` now: work in a thread takes no virtual time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _run_once(self) -> None:
        """One turn: all callbacks that are ready at its beginning."""
        timers = self._timers
        while timers and (timers[0][0] <= self.now_s or not self._ready):
            when_s, _, timer = heapq.heappop(timers)
            if not timer._cancelled:
                self.now_s = max(self.now_s, when_s)
                self._ready.append(timer)
        if not self._ready:
            raise Violation("every task waits and no timer runs: a wake-up was lost")
        batch = list(self._ready)
        self._ready.clear()
        self._shuffle(batch)
        for handle in batch:
            if not handle._cancelled:
                handle._run()
        self.num_turns += 1
        self.after_turn()

    def _write_to_self(self) -> None:
        """There are no other threads."""


def run_virtual(loop: VirtualLoop, main: Coroutine[Any, Any, None]) -> None:
    """Run `main`, with all clocks of this process on virtual time; no task may be left."""
    clock = loop.time
    assert run.__defaults__
    defaults = tuple(clock if value is time.perf_counter else value for value in run.__defaults__)
    times = {"perf_counter": clock, "monotonic": clock, "time": lambda: EPOCH_S + clock()}
    with mock.patch.dict(vars(time), times), mock.patch.object(run, "__defaults__", defaults):
        try:
            loop.run_until_complete(main)
            if left := asyncio.all_tasks(loop):
                raise Violation(f"{len(left)} tasks did not end, such as {next(iter(left))}")
        finally:  # ends what a violation leaves behind
            loop.after_turn = lambda: None
            loop.set_exception_handler(lambda *_: None)
            with suppress(Violation):
                while left := asyncio.all_tasks(loop):
                    for task in left:
                        task.cancel()
                    loop.run_until_complete(asyncio.wait(left, timeout=EPOCH_S))
            loop.close()
