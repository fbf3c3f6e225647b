"""Threads that load models and compute, the exit of a process while one runs, and ends of tasks.

Standard library only.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class ComputeThread(threading.Thread):
    """A daemon thread: the process can exit while it computes, see `leave`."""

    def __init__(self, name: str, target: Callable[..., object], *arguments: Any) -> None:
        super().__init__(name=name, target=target, args=arguments, daemon=True)


class WorkClock:
    """Measures the work under way in one or more threads, for a heartbeat."""

    def __init__(self) -> None:
        self._begins: dict[object, float] = {}

    @contextmanager
    def working(self) -> Iterator[None]:
        """A piece of work, which must not take long; waiting for work is none."""
        piece = object()
        self._begins[piece] = time.monotonic()
        try:
            yield
        finally:
            del self._begins[piece]

    def oldest_s(self) -> float:
        """Seconds that the oldest piece under way takes already; 0 if there is none."""
        begins = [*self._begins.values()]  # a copy: other threads change the original
        return time.monotonic() - min(begins) if begins else 0.0


def settle(future: Future[T], do: Callable[[], T]) -> bool:
    """Set the future to the result or exception of `do`; False: it raised or was cancelled."""
    if not future.set_running_or_notify_cancel():
        return False
    try:
        result = do()
    except BaseException as error:
        future.set_exception(error)
        return False
    future.set_result(result)
    return True


def bound_spinning() -> None:
    """Make OpenMP's idle threads sleep after some 50 us; call it before torch is imported.

    By default they spin for 10 ms and more, which on shared cores takes the time of the threads
    that they wait for. The user's own OMP_WAIT_POLICY or GOMP_SPINCOUNT stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


async def load(do: Callable[[], T]) -> T:
    """The result of `do`, run in a thread that does not prevent the process from exiting."""
    future: Future[T] = Future()
    ComputeThread("load", settle, future, do).start()
    return await asyncio.wrap_future(future)


def leave() -> None:
    """Exit with 0 at once if a thread still loads or computes; else do nothing.

    An interpreter that shuts down while a thread runs in torch aborts the process.
    """
    if any(isinstance(thread, ComputeThread) for thread in threading.enumerate()):
        for child in multiprocessing.active_children():  # vLLM's ignore SIGTERM while they load
            child.kill()
        logging.shutdown()
        os._exit(0)


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, whatever that is.

    `asyncio.wait` does not raise the task's CancelledError. Suppressing it around `await task`
    would also suppress a cancellation of the caller.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # otherwise asyncio logs it as lost


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls that run at once, in order; the first failure, or a cancellation, ends
    the others before it is raised. A TaskGroup would wrap the error, which decides the status."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
