"""The engine in a thread of its own: commands from any thread, executed between steps."""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from generator_service.engine.commands import OpenCommand, Opened, PrefixBatch
from generator_service.engine.engine import Engine, refuse, resolve
from specrej.contracts import NO_FORKS, Forks, Pruned
from specrej.contracts.errors import InternalError, SpecrejError, Unavailable
from specrej.threads import ComputeThread, WorkClock

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """Runs an `Engine`; each command returns a future."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = ComputeThread("engine", self._run)
        self._clock = WorkClock()
        self._stopping = False
        self._ended = False  # from here on every command but `close` fails

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; open, waiting and later sessions fail with Unavailable.

        Waits `timeout_s` seconds for the step under way, which may never end.
        """
        self._stopping = True
        self._commands.put(lambda: None)
        self._thread.join(timeout_s)

    def open(self, command: OpenCommand) -> tuple[int, Future[Opened]]:
        """A session's id at once; the future waits for its slots.

        The future raises InvalidRequest (it can never fit) or Overloaded (too many wait).
        """
        session = self.engine.new_session(command)
        return session.id, self._send(session.opened, lambda: self.engine.open(session))

    def extend(
        self,
        session_id: int,
        until_tokens: int,
        report: Callable[[PrefixBatch], None] | None = None,
    ) -> Future[PrefixBatch]:
        """As `Engine.extend`; the engine's thread calls `report`."""
        future: Future[PrefixBatch] = Future()
        return self._send(
            future, lambda: self.engine.extend(session_id, until_tokens, future, report)
        )

    def prune(
        self, session_id: int, keep: Collection[int], forks: Forks = NO_FORKS
    ) -> Future[Pruned]:
        future: Future[Pruned] = Future()
        return self._send(
            future, lambda: resolve(future, self.engine.prune(session_id, keep, forks))
        )

    def close(self, session_id: int) -> Future[int]:
        future: Future[int] = Future()
        return self._send(future, lambda: resolve(future, self.engine.close(session_id)), 0)

    def heartbeat_s(self) -> float:
        """Seconds since the running step or command began; 0 between them, infinite if the thread
        has not started or has ended by itself."""
        if not self._stopping and (self._ended or not self._thread.is_alive()):
            return math.inf
        return self._clock.oldest_s()

    def _send(
        self, future: Future[T], command: Callable[[], object], if_ended: T | None = None
    ) -> Future[T]:
        """Have the thread execute `command`, which settles `future` unless it raises."""

        def execute() -> None:
            try:
                if not self._ended:
                    command()
                elif if_ended is not None:
                    resolve(future, if_ended)
                else:
                    refuse(future, _gone())
            except SpecrejError as error:
                refuse(future, error)
            except Exception:
                log.exception("command failed")
                refuse(future, InternalError("the generator's command failed"))

        self._commands.put(execute)
        if self._ended:
            self._execute_commands()  # the thread may have executed its last command before
        return future

    def _execute_commands(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._execute(self._commands.get_nowait())

    def _execute(self, command: Callable[[], None]) -> None:
        with self._clock.working():
            command()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException:  # such as a SystemExit in a hook
            log.critical("the engine's thread ends", exc_info=True)
        self.engine.start_over(_gone())
        self._ended = True
        self._execute_commands()

    def _turn(self) -> None:
        """All commands that wait, or the next one if there is nothing to compute; then a step."""
        try:
            if not self.engine.has_work:
                with self._clock.working():
                    checked = self.engine.ledger if self.engine.sessions else self.engine
                    checked.check_integrity()
                self._execute(self._commands.get())
            self._execute_commands()
            with self._clock.working():
                self.engine.step()
        except Exception:
            # A bug, after which the state of the sessions is unknown.
            log.exception("the engine starts over, without its sessions")
            with self._clock.working():
                self.engine.start_over(InternalError("the generator had to start over"))


def _gone() -> Unavailable:
    return Unavailable("the generator is shutting down")
