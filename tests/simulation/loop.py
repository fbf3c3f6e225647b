"""An event loop on virtual time: no sockets, no threads, no sleeping; its order is the seed's."""

import asyncio
import heapq
import random
from contextlib import suppress
from itertools import count
from typing import Any, cast

EPOCH_S = 1.8e9  # the wall clock at the start


class Violation(AssertionError):
    """An invariant does not hold."""


class VirtualLoop(asyncio.BaseEventLoop):
    """When nothing is ready, its time jumps to the next timer; with `shuffles`, callbacks that are
    ready together run in an order drawn from `rng`."""

    now_s = 0.0

    def __init__(self, rng: random.Random, *, shuffles: bool) -> None:
        super().__init__()
        self._shuffle = rng.shuffle if shuffles else lambda batch: None
        self._ready: Any  # of the base class
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()  # of timers, in the order of their creation
        self.changed: list[Any] = []
        self.failure: Exception | None = None

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Any, *args: Any, **context: Any) -> Any:  # type: ignore[override]
        """A timer; the base class compares timers in Python, and in no certain order if equal."""
        timer = asyncio.TimerHandle(when, callback, args, self, **context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        """Keep no set of all generators: none is left at the end, as no task is."""

    def run_in_executor(self, _: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Call `func` now: work in a thread takes no virtual time."""
        return self.create_task(asyncio.sleep(0, func(*args)))

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

    call_exception_handler = fail  # type: ignore[assignment]

    def _write_to_self(self) -> None:
        """There are no other threads."""

    def close(self) -> None:
        """End what a violation has left behind, without checks."""
        self.check = lambda: None  # type: ignore[method-assign]
        with suppress(Violation):
            while left := asyncio.all_tasks(self):
                for task in left:
                    task.cancel()
                self.run_until_complete(asyncio.wait(left, timeout=EPOCH_S))
        super().close()


def note_change(one: Any) -> None:
    """Call `one.check()` after this turn."""
    cast(VirtualLoop, asyncio.get_running_loop()).changed.append(one)


def fail(what: str) -> None:
    """Raise a Violation after this turn, where the product would catch it."""
    cast(VirtualLoop, asyncio.get_running_loop()).fail(what)
