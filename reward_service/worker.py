"""One reward in a thread of its own: batches of all sessions share passes, behind a bounded queue.

Keeps torch and tokenizers off the event loop, and checks what a reward returns. The thread computes
pass after pass; before each it takes in what has arrived, drops abandoned batches, and takes a
fair part of each batch under way. Imports no torch and no grpc.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from reward_service.reward import Reward, RewardLost, RewardSession, ScoringTask, take_fairly
from reward_service.scoring import RewardWorker, WorkerSession, queue_full, worker_closed
from specrej.contracts import Candidate, Prompt, Scores
from specrej.telemetry import metrics, names
from specrej.threads import ComputeThread, WorkClock, settle

log = logging.getLogger(__name__)

T = TypeVar("T")

# Errors of torch, which is not imported here, after which a process can use its device no more.
_LOST = ("AcceleratorError",)


@dataclass(eq=False, slots=True, kw_only=True)
class _Request(Generic[T]):
    """What the thread receives; `abandoned` once its caller is gone."""

    future: Future[T] = field(default_factory=Future)
    abandoned: bool = False


@dataclass(eq=False, slots=True)
class _Call(_Request[T]):
    """A short call, made between two passes."""

    do: Callable[[], T]


@dataclass(eq=False, slots=True)
class _Batch(_Request[Scores]):
    """A session's candidates to be scored; `task` once the thread has begun with them."""

    session: RewardSession
    candidates: Sequence[Candidate]
    task: ScoringTask | None = None
    given: int = 0  # tokens of its task in passes so far
    is_alone: bool = False  # in passes of its own, since a pass that it shared failed


class Worker(RewardWorker):
    """Scores with one reward; made by `start`, ended by `close`.

    At most `queue_limit` calls wait or run. A call that is cancelled while it waits is never
    computed; one under way gets no part of the next pass.
    """

    def __init__(self, load: Callable[[], Reward], queue_limit: int, merge_s: float) -> None:
        self._queue_limit = queue_limit
        self._merge_s = merge_s
        self._room = threading.Semaphore(queue_limit)
        self._arrivals: queue.SimpleQueue[_Request[Any] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._dead = False  # the thread has ended without `close`
        self._num_sessions = 0  # used by the thread alone
        self._clock = WorkClock()
        self._reward: Reward
        self._loaded: Future[None] = Future()
        self._thread = ComputeThread("reward", self._serve, load)
        self._thread.start()

    @classmethod
    async def start(
        cls, load: Callable[[], Reward], queue_limit: int = 64, merge_s: float = 0.002
    ) -> Worker:
        """A worker that has loaded the reward with `load` in its thread, and scored once.

        With several sessions open, a batch waits `merge_s` seconds for others to share its pass.
        Raises what `load` raises.
        """
        worker = cls(load, queue_limit, merge_s)
        try:
            await asyncio.wrap_future(worker._loaded)
            await worker.warm_up()
        except BaseException:
            worker.close()
            raise
        return worker

    @property
    def reward(self) -> Reward:
        return self._reward

    @asynccontextmanager
    async def open(self, prompt: Prompt, *, once: bool = False) -> AsyncIterator[WorkerSession]:
        opening = _Call(partial(self._open, prompt, once))
        try:
            session = await self._submit(opening)
        except asyncio.CancelledError:
            # The thread may open it all the same.
            opening.future.add_done_callback(self._close_late)
            raise
        try:
            yield WorkerSession(self._reward.name, partial(self._score, session))
        finally:
            self._close_session(session)

    def close(self) -> None:
        """Refuse what waits; the pass under way is completed, see `join`."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._arrivals.put(None)

    def heartbeat_s(self) -> float:
        """Seconds since the pass or call under way began; 0 between them, infinite if the thread
        died."""
        if self._dead or (not self._thread.is_alive() and not self._closed):
            return math.inf
        return self._clock.oldest_s()

    async def join(self, timeout_s: float) -> None:
        """Wait for the end of the pass under way, after `close`."""
        await asyncio.to_thread(self._thread.join, timeout_s)

    async def _score(self, session: RewardSession, candidates: Sequence[Candidate]) -> Scores:
        return await self._submit(_Batch(session, candidates))

    async def _submit(self, request: _Request[T]) -> T:
        """The result of a request to the thread.

        Raises:
            Overloaded, Unavailable: as `score` does.
        """
        if not self._room.acquire(blocking=False):
            raise queue_full(self._reward.name, self._queue_limit)
        metrics.add(names.REWARD_QUEUED, 1, reward=self._reward.name)
        # Called when the thread is done with it, or when it is cancelled before the thread begins.
        request.future.add_done_callback(self._make_room)
        with self._closing:
            if self._closed or self._dead:
                request.future.cancel()
                raise worker_closed()
            self._arrivals.put(request)
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.abandoned = True
            raise

    def _make_room(self, _: object) -> None:
        self._room.release()
        metrics.add(names.REWARD_QUEUED, -1, reward=self._reward.name)

    def _close_session(self, session: RewardSession) -> None:
        with self._closing:
            if not (self._closed or self._dead):  # queued, as its batch may still be under way
                self._arrivals.put(_Call(partial(self._close, session)))

    def _close_late(self, opened: Future[RewardSession]) -> None:
        with suppress(BaseException):
            self._close_session(opened.result())

    # The thread calls everything below.

    def _open(self, prompt: Prompt, once: bool) -> RewardSession:
        session = self._reward.open(prompt, once=once)
        self._num_sessions += 1
        return session

    def _close(self, session: RewardSession) -> None:
        self._num_sessions -= 1
        session.close()

    def _serve(self, load: Callable[[], Reward]) -> None:
        """Load, then compute pass after pass until closed."""

        def load_here() -> None:
            self._reward = load()

        if not settle(self._loaded, load_here):
            return
        under_way: list[_Batch] = []
        try:
            while self._take_in(under_way):
                with self._clock.working():
                    under_way[:] = [batch for batch in under_way if not self._is_dropped(batch)]
                    self._compute(under_way)
                    under_way[:] = [batch for batch in under_way if not self._is_done(batch)]
        except BaseException:
            # A bug here, or in a reward where no error is allowed; callers must not wait for ever.
            log.critical("the thread of reward %s ends", self._reward.name, exc_info=True)
        with self._closing:
            self._dead = not self._closed  # no request arrives after this
        for batch in under_way:
            _fail(batch, worker_closed())
        with suppress(queue.Empty):
            while True:
                if request := self._arrivals.get_nowait():
                    _fail(request, worker_closed())

    def _take_in(self, under_way: list[_Batch]) -> bool:
        """Begin with what has arrived, and wait if nothing is under way; False once closed.

        What arrives during this is left for the next pass, so that arrivals cannot delay passes
        without end.
        """
        merge_until = 0.0
        num_arrivals = self._arrivals.qsize()
        while True:
            all_here = len(under_way) >= self._num_sessions
            wait_s = 0.0 if all_here else max(0.0, merge_until - time.monotonic())
            if under_way and num_arrivals <= 0 and not wait_s:
                return True
            try:
                arrived = self._arrivals.get(not under_way or wait_s > 0, wait_s or None)
            except queue.Empty:
                return True
            num_arrivals -= 1
            if arrived is None:
                return False
            if not under_way and self._num_sessions > 1 and isinstance(arrived, _Batch):
                merge_until = time.monotonic() + self._merge_s
            with self._clock.working():
                self._take(arrived, under_way)

    def _take(self, arrived: _Request[Any], under_way: list[_Batch]) -> None:
        """Make a call, or begin with a batch."""
        match arrived:
            case _Call():
                _carry_out(arrived)
            case _Batch():
                # Not 0: it would take all passes until it caught up with the others.
                arrived.given = min((batch.given for batch in under_way), default=0)
                if arrived.future.set_running_or_notify_cancel() and _begin(arrived):
                    under_way.append(arrived)

    def _is_dropped(self, batch: _Batch) -> bool:
        if abandoned := batch.abandoned:  # read once: another thread sets it
            batch.session.close()  # it counts on what will not be computed
            batch.future.set_result(Scores(()))
        return abandoned

    def _compute(self, batches: Sequence[_Batch]) -> None:
        """One pass, of a batch that is to be alone or of all others, whichever has had less.

        If it fails, each batch that took part begins again in passes of its own, so that only the
        one that caused the error fails.
        """
        first = min(batches, key=lambda batch: batch.given, default=None)
        if first and first.is_alone:
            sharing = [first]
        else:
            sharing = [batch for batch in batches if not batch.is_alone]
        given = [batch.given for batch in sharing]
        try:
            tasks = [batch.task for batch in sharing if batch.task]
            if pieces := take_fairly(tasks, self._reward.token_budget, given):
                self._reward.compute(pieces)
        except BaseException as error:
            if _is_lost(error):
                raise  # ends the thread: health reports it, and other services score
            pairs = zip(sharing, given, strict=True)
            took_part = [batch for batch, tokens in pairs if tokens > batch.given] or sharing
            for batch in took_part:
                batch.session.close()
                if len(took_part) == 1:
                    _fail(batch, error)
                else:
                    batch.is_alone = True
                    _begin(batch)
        for batch, tokens in zip(sharing, given, strict=True):
            batch.given = tokens

    def _is_done(self, batch: _Batch) -> bool:
        if not batch.future.done() and batch.task and not batch.task.next_tokens:
            try:
                batch.future.set_result(batch.task.scores())
            except BaseException as error:
                if _is_lost(error):  # a device fails as late as here
                    raise
                batch.session.close()
                _fail(batch, error)
        return batch.future.done()


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, RewardLost) or type(error).__name__ in _LOST


def _begin(batch: _Batch) -> bool:
    """Make the batch's task; False if its reward raises."""
    try:
        batch.task = batch.session.begin(batch.candidates)
    except BaseException as error:
        batch.session.close()
        _fail(batch, error)
        return False
    return True


def _carry_out(call: _Call[T]) -> None:
    if call.future.set_running_or_notify_cancel():
        try:
            call.future.set_result(call.do())
        except BaseException as error:
            _fail(call, error)


def _fail(request: _Request[Any], error: BaseException) -> None:
    # Asyncio's futures refuse a StopIteration, so its caller would wait for ever; a TimeoutError
    # or CancelledError would be taken for the call's own; what is no `Exception`, such as a
    # SystemExit in a user's function, would end the event loop.
    misread = (StopIteration, TimeoutError, CancelledError)
    if isinstance(error, misread) or not isinstance(error, Exception):
        wrapped = RuntimeError(f"a reward raised {type(error).__name__}")
        wrapped.__cause__ = error
        error = wrapped
    with suppress(InvalidStateError):  # done already, or cancelled
        request.future.set_exception(error)
