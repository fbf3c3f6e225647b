"""Serves one reward: checks what it returns, measures it, and bounds the calls that wait or run.

A reward of this process has a thread of its own, which keeps torch and tokenizers off the event
loop. It computes pass after pass. Before each it takes in what has arrived, drops abandoned
batches, and takes a fair part of each batch under way, of all sessions. A reward of another server
is awaited on the event loop: a slow server delays its own callers only, and waiting for it does not
count for the heartbeat. Imports no torch and no grpc.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reward_service.reward import RemoteReward, Reward, RewardLost, Task, as_candidates, take_fairly
from specrej.contracts import Candidate, FinishReason, Prompt, RewardDescription, Scores
from specrej.contracts.errors import Overloaded, RewardInvalid, SpecrejError, Unavailable
from specrej.contracts.validation import refuse_images
from specrej.telemetry import metrics, names
from specrej.threads import ComputeThread, WorkClock, settle

log = logging.getLogger(__name__)

_WARM_UP_PROMPT = Prompt.from_user("Hello?")


@dataclass(eq=False, slots=True)
class _Request:
    """A call to the thread. It is done when `do` returns; if `do` returns a task, when the task is
    computed."""

    do: Callable[[], Any]
    session: Any = None  # the task's, freed if the task fails
    future: Future[Any] = field(default_factory=Future)
    task: Task = field(init=False)  # once `do` has returned it
    is_abandoned: bool = False  # its caller has left
    is_alone: bool = False  # in passes of its own, since a pass that it shared failed


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """One reward, bound to one prompt; made by `Worker.open`."""

    _name: str
    _score: Callable[[Sequence[Candidate]], Awaitable[Scores]]

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        """Raises as `Worker.score` does."""
        began, label = time.perf_counter(), {names.REWARD: self._name}
        scores = await self._score(candidates)
        problem = ""
        if len(scores.values) != len(candidates):
            problem = f"{len(scores.values)} scores for {len(candidates)} texts"
        elif not all(map(math.isfinite, scores.values)):
            problem = "a score that is not finite"
        if problem:
            text = f"reward {self._name} returned {problem}"
            raise RewardInvalid(text, metadata={"reward": self._name})
        metrics.record(names.REWARD_DURATION, time.perf_counter() - began, **label)
        metrics.record(names.REWARD_BATCH, len(candidates), **label)
        metrics.add(names.REWARD_TOKENS, scores.computed_tokens, **label)
        return scores


class Worker:
    """Serves one reward to any number of callers; made by `start`, ended by `close`.

    At most `queue_limit` calls wait or run. A call that is cancelled while it waits is never
    computed; one under way gets no part of the next pass, and its request to a server ends.
    """

    def __init__(self, load: Callable[[], Reward | RemoteReward], queue_limit: int) -> None:
        self._queue_limit = queue_limit
        self._room = threading.Semaphore(queue_limit)
        self._arrivals: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._dead = False  # the thread has ended without `close`
        self._clock = WorkClock()
        self._reward: Reward
        self._remote: RemoteReward | None = None
        self._loaded: Future[None] = Future()
        self._thread = ComputeThread("reward", self._serve, load)
        self._thread.start()

    @classmethod
    async def start(
        cls, load: Callable[[], Reward | RemoteReward], queue_limit: int = 64
    ) -> Worker:
        """A worker that has loaded the reward with `load` in its thread, and scored once.

        A reward whose server is busy or not reached yet is served without that score.
        Raises what `load` raises, and ValueError or a SpecrejError if it cannot score once.
        """
        worker = cls(load, queue_limit)
        is_loaded = False
        try:
            await asyncio.wrap_future(worker._loaded)
            is_loaded = True
            data = worker.reward.sample_data
            await worker.score(_WARM_UP_PROMPT, ["Hello."], data=data)
        except BaseException as error:
            if worker._remote and isinstance(error, Unavailable | Overloaded):
                log.warning("serving without it: %s", error.message)
                return worker
            worker.close()
            await worker.join(0)
            if not is_loaded or isinstance(error, SpecrejError) or not isinstance(error, Exception):
                raise
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            raise ValueError(f"reward {worker.reward.name}: {reason}") from error
        return worker

    @property
    def reward(self) -> Reward | RemoteReward:
        """The reward, once it is loaded."""
        return self._remote or self._reward

    @property
    def description(self) -> RewardDescription:
        """The reward's, once it is loaded."""
        reward = self.reward
        return RewardDescription(
            reward.name,
            reward.fingerprint,
            reward.description,
            takes_data=reward.takes_data,
            is_cheap=reward.is_cheap,
            takes_images=reward.images != "text",  # and may refuse them
        )

    async def score(
        self, prompt: Prompt, texts: Sequence[str], *, whole: bool = True, data: str = ""
    ) -> Scores:
        """Finite scores, one per text; `whole`: they are complete answers.

        Raises:
            InvalidRequest: the reward cannot take this prompt or this data.
            Overloaded: too many calls wait or run already.
            RewardInvalid: the reward returned something else.
            Unavailable: the worker is closed, or the reward's server does not answer.
        """
        candidates = as_candidates(texts, FinishReason.STOP if whole else None)
        async with self.open(prompt, data, once=True) as session:
            return await session.score(candidates)

    @asynccontextmanager
    async def open(
        self, prompt: Prompt, data: str = "", *, once: bool = False
    ) -> AsyncIterator[WorkerSession]:
        """A session, which frees what it keeps when the context is left; `once`: for one batch.

        Raises as `score` does.
        """
        match self.reward.images:
            case "text":
                prompt = prompt.without_images
            case "refuse":
                refuse_images(prompt)
        if self._remote:
            answer = partial(self._answer, self._remote, prompt, data)
            yield WorkerSession(self._remote.name, answer)
            return
        opening = partial(self._reward.open, prompt, once=once)
        if self._reward.takes_data:
            opening = partial(self._reward.open_with, prompt, data)
        session = await self._submit(_Request(opening))

        def compute(candidates: Sequence[Candidate]) -> Awaitable[Scores]:
            begin = partial(self._reward.begin, session, candidates)
            return self._submit(_Request(begin, session))

        try:
            yield WorkerSession(self._reward.name, compute)
        finally:
            with self._closing:
                if not self._closed:  # queued, as its batch may still be under way
                    self._arrivals.put(_Request(partial(self._reward.free, session)))

    def close(self) -> None:
        """Refuse new calls and what waits; the pass under way is completed, see `join`."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._arrivals.put(None)

    async def join(self, timeout_s: float) -> None:
        """Wait for the end of the pass under way, after `close`; end a server's connections."""
        if self._remote:
            await self._remote.aclose()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def heartbeat_s(self) -> float:
        """Seconds since the pass or call under way began; 0 between them, infinite if the thread
        died."""
        return math.inf if self._dead else self._clock.oldest_s()

    async def _answer(
        self, remote: RemoteReward, prompt: Prompt, data: str, candidates: Sequence[Candidate]
    ) -> Scores:
        if self._closed:
            raise _worker_closed()
        self._take_room()
        try:
            return await remote.answer(prompt, candidates, data)
        finally:
            self._make_room()

    async def _submit(self, request: _Request) -> Any:
        """The result of a request to the thread.

        Raises:
            Overloaded, Unavailable: as `score` does.
        """
        self._take_room()
        # Called when the thread is done with it, or when it is cancelled before the thread begins.
        request.future.add_done_callback(self._make_room)
        with self._closing:
            if self._closed:
                request.future.cancel()
                raise _worker_closed()
            self._arrivals.put(request)
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.is_abandoned = True
            raise

    def _take_room(self) -> None:
        """Count a call that waits or runs. Raises Overloaded."""
        if not self._room.acquire(blocking=False):
            text = f"reward {self.reward.name}: {self._queue_limit} calls wait already"
            raise Overloaded(text)
        metrics.add(names.REWARD_QUEUED, 1, reward=self.reward.name)

    def _make_room(self, _: object = None) -> None:
        self._room.release()
        metrics.add(names.REWARD_QUEUED, -1, reward=self.reward.name)

    # The thread calls everything below.

    def _load(self, load: Callable[[], Reward | RemoteReward]) -> None:
        loaded = load()
        if isinstance(loaded, Reward):
            self._reward = loaded
        else:
            self._remote = loaded

    def _serve(self, load: Callable[[], Reward | RemoteReward]) -> None:
        """Load, then compute pass after pass until closed."""
        if not settle(self._loaded, partial(self._load, load)) or self._remote:
            return
        under_way: list[_Request] = []
        try:
            while self._take_in(under_way):
                with self._clock.working():
                    under_way[:] = [batch for batch in under_way if not self._is_dropped(batch)]
                    self._compute(under_way)
                    under_way[:] = [batch for batch in under_way if not self._is_done(batch)]
        except BaseException:
            # A bug here, or a reward that raises in `free`: callers must not wait for ever.
            log.critical("the thread of reward %s ends", self._reward.name, exc_info=True)
        with self._closing:
            self._dead = not self._closed
            self._closed = True  # no request arrives after this
        while not self._arrivals.empty():
            if request := self._arrivals.get():
                under_way.append(request)
        for request in under_way:
            _fail(request, _worker_closed())

    def _take_in(self, under_way: list[_Request]) -> bool:
        """Begin with what has arrived, and wait if nothing is under way; False once closed.

        What arrives during this is left for the next pass, so that arrivals cannot delay passes
        without end.
        """
        num_arrivals = self._arrivals.qsize()
        while num_arrivals > 0 or not under_way:
            arrived = self._arrivals.get()
            num_arrivals -= 1
            if arrived is None:
                return False
            # Not 0: it would take all passes until it caught up with the others.
            given = min((batch.task.given for batch in under_way), default=0)
            with self._clock.working():
                is_running = arrived.future.set_running_or_notify_cancel()
                if not (is_running and self._begin(arrived, given)):
                    continue
            under_way.append(arrived)
        return True

    def _begin(self, request: _Request, given: int) -> bool:
        """Run `do`; whether the request now has a task to compute, which counts as `given`."""
        try:
            result = request.do()
        except BaseException as error:
            self._fail_task(request, error)
            return False
        if isinstance(result, Task):
            request.task, result.given = result, given
            return True
        request.future.set_result(result)
        return False

    def _fail_task(self, request: _Request, error: BaseException) -> None:
        _fail(request, error)
        if request.session is not None:
            self._reward.free(request.session)  # it counts on what was not computed

    def _is_dropped(self, batch: _Request) -> bool:
        if abandoned := batch.is_abandoned:  # read once: another thread sets it
            self._reward.free(batch.session)  # it counts on what will not be computed
            batch.future.set_result(Scores(()))
        return abandoned

    def _compute(self, batches: Sequence[_Request]) -> None:
        """One pass, of a batch that is to be alone or of all others, whichever has had less.

        If it fails, each batch that took part begins again in passes of its own, so that only the
        one that caused the error fails.
        """
        first = min(batches, key=lambda batch: batch.task.given, default=None)
        if first and first.is_alone:
            sharing = [first]
        else:
            sharing = [batch for batch in batches if not batch.is_alone]
        given = [batch.task.given for batch in sharing]
        try:
            if pieces := take_fairly([batch.task for batch in sharing], self._reward.token_budget):
                self._reward.compute(pieces)
        except BaseException as error:
            if _is_lost(error):
                raise  # ends the thread: health reports it, and other services score
            pairs = zip(sharing, given, strict=True)
            took_part = [batch for batch, before in pairs if batch.task.given > before] or sharing
            for batch in took_part:
                if len(took_part) == 1:
                    self._fail_task(batch, error)
                else:
                    self._reward.free(batch.session)
                    batch.is_alone = True
                    self._begin(batch, batch.task.given)

    def _is_done(self, batch: _Request) -> bool:
        if not batch.future.done() and not batch.task.next_tokens:
            try:
                batch.future.set_result(batch.task.scores())
            except BaseException as error:
                if _is_lost(error):  # a device fails as late as here
                    raise
                self._fail_task(batch, error)
        return batch.future.done()


def _is_lost(error: BaseException) -> bool:
    # After this error of torch, which is not imported here, a process cannot use its device.
    return isinstance(error, RewardLost) or type(error).__name__ == "AcceleratorError"


def _worker_closed() -> Unavailable:
    return Unavailable("the reward is being stopped")


def _fail(request: _Request, error: BaseException) -> None:
    # Asyncio's futures refuse a StopIteration, so its caller would wait for ever. A TimeoutError or
    # CancelledError would be taken for the call's own. Anything that is not an `Exception`, such as
    # a SystemExit in a user's function, would end the event loop.
    misread = (StopIteration, TimeoutError, CancelledError)
    if isinstance(error, misread) or not isinstance(error, Exception):
        wrapped = RuntimeError(f"a reward raised {type(error).__name__}")
        wrapped.__cause__ = error
        error = wrapped
    with suppress(InvalidStateError):  # done already, or cancelled
        request.future.set_exception(error)
