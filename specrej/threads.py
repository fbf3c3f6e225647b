"""Threads that load models and compute, and the end of a process in which one still does.

Standard library only.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class ComputeThread(threading.Thread):
    """A daemon: whoever cannot wait for what it computes can still end, see `leave`."""

    def __init__(self, name: str, target: Callable[..., object], *arguments: Any) -> None:
        super().__init__(name=name, target=target, args=arguments, daemon=True)


def settle(future: Future[T], do: Callable[[], T]) -> bool:
    """Put what it returns or raises into the future; False: it raised, or nobody waits for it."""
    if not future.set_running_or_notify_cancel():
        return False
    try:
        result = do()
    except BaseException as error:
        future.set_exception(error)
        return False
    future.set_result(result)
    return True


async def load(do: Callable[[], T]) -> T:
    """What `do` returns or raises, from a thread that does not keep the process from ending."""
    future: Future[T] = Future()
    ComputeThread("load", settle, future, do).start()
    return await asyncio.wrap_future(future)


def leave() -> None:
    """End the process here, with 0, if a thread still loads or computes; else do nothing.

    An interpreter that ends under a thread in torch aborts the process.
    """
    if any(isinstance(thread, ComputeThread) for thread in threading.enumerate()):
        for child in multiprocessing.active_children():  # vLLM's, deaf to SIGTERM while they load
            child.kill()
        logging.shutdown()
        os._exit(0)
