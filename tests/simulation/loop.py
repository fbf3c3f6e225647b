"""An event loop on virtual time: no sockets, no threads, no sleeping; its order is the seed's."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from itertools import count
from typing import Any, cast
from unittest import mock

from orchestrator.loop import run

EPOCH_S = 1.8e9  # the wall clock at the start


class Violation(AssertionError):
    """An invariant does not hold."""


class _Callback(list[Any]):
    """A function, its arguments and its context: asyncio's handles take several times longer."""

    def __init__(self, call: Any, args: Any, context: Context | None) -> None:
        super().__init__((call, args, copy_context() if context is None else context))

    def cancel(self) -> None:
        self[0] = None


class VirtualLoop(asyncio.BaseEventLoop):
    """When nothing is ready, its time jumps to the next timer.

    With `shuffles`, callbacks that are ready together run in an order drawn from `rng`, else in
    the order in which they became ready.
    """

    now_s = 0.0

    def __init__(self, rng: random.Random, *, shuffles: bool) -> None:
        super().__init__()
        self._shuffle = rng.shuffle if shuffles else lambda batch: None
        self._soon: list[_Callback] = []
        self._timers: list[tuple[float, int, _Callback]] = []
        self._numbers = count()  # of timers, in the order of their creation
        self.changed: list[Any] = []
        self.failure: Exception | None = None

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        self._soon.append(_Callback(callback, args, context))

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no other threads

    def call_at(self, when: Any, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """A timer; asyncio compares timers in Python, and in no certain order if equal."""
        timer = _Callback(callback, args, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(self, delay: Any, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        """Keep no set of all generators: none is left at the end, as no task is."""

    def run_in_executor(self, _: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Call `func` now: work in a thread takes no virtual time."""

        async def call() -> Any:
            return func(*args)

        return self.create_task(call())

    def _run_once(self) -> None:
        """One turn: all callbacks that are ready at its beginning."""
        timers, batch = self._timers, self._soon
        while timers and (timers[0][0] <= self.now_s or not batch):
            when_s, _, timer = heapq.heappop(timers)
            if timer[0]:
                self.now_s = max(self.now_s, when_s)
                batch.append(timer)
        if not batch:
            raise Violation("every task waits and no timer runs: a wake-up was lost")
        self._soon = []
        if len(batch) > 1:
            self._shuffle(batch)
        for callback in batch:
            call, args, context = callback
            if call:  # not cancelled by an earlier one
                try:
                    context.run(call, *args)
                except Exception as error:
                    self.fail(error)
        self.check()

    def check(self) -> None:
        """Raise the failure, or check the invariants of all that changed in this turn."""
        if self.failure:
            raise self.failure
        while self.changed:
            self.changed.pop().check()

    def fail(self, what: object) -> None:
        """End the run after this turn; `what` is a bug or breaks an invariant."""
        self.failure = self.failure or Violation(what)

    def call_exception_handler(self, context: Any) -> None:
        self.fail(context)


def note_change(one: Any) -> None:
    """Call `one.check()` after this turn."""
    cast(VirtualLoop, asyncio.get_running_loop()).changed.append(one)


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
            loop.check = lambda: None  # type: ignore[method-assign]
            with suppress(Violation):
                while left := asyncio.all_tasks(loop):
                    for task in left:
                        task.cancel()
                    loop.run_until_complete(asyncio.wait(left, timeout=EPOCH_S))
            loop.close()
