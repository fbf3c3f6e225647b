"""One reward in a thread of its own: batches of all sessions, merged, behind a bounded queue.

Keeps torch and tokenisers off the event loop, and checks what a reward returns. The thread computes
pass after pass; before each it takes in what has arrived, drops whom nobody waits for, and gives
every batch under way its part of the pass. Knows no wire and no torch; imports without grpc.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from reward_service.batching import take_fairly
from reward_service.reward import Reward, RewardSession, ScoringTask, score_batch, whole_answers
from specrej.contracts import Candidate, Prompt, RewardDescription, Scores
from specrej.errors import Overloaded, RewardInvalid, Unavailable

T = TypeVar("T")

_WARM_UP_PROMPT = Prompt.from_user("Hello?")


class _Request(Protocol[T]):
    """What the thread is asked; `abandoned` once nobody waits for it any more."""

    future: Future[T]
    abandoned: bool


@dataclass(eq=False, slots=True)
class _Call(Generic[T]):
    """Something short to be done by the thread, between two passes."""

    do: Callable[[], T]
    future: Future[T] = field(default_factory=Future)
    abandoned: bool = False


@dataclass(eq=False, slots=True)
class _Batch:
    """A session's candidates to be scored; `task` once the thread has begun with them."""

    session: RewardSession
    candidates: Sequence[Candidate]
    future: Future[Scores] = field(default_factory=Future)
    abandoned: bool = False
    task: ScoringTask | None = None


class Worker:
    """Scores with one reward; made by `start`, ended by `close`.

    At most `queue_limit` calls at once, waiting or under way. One that is given up while it waits
    is never computed, one under way gets no part of the next pass.
    """

    def __init__(self, load: Callable[[], Reward], queue_limit: int, merge_s: float) -> None:
        self._queue_limit = queue_limit
        self._merge_s = merge_s
        self._room = threading.Semaphore(queue_limit)
        self._arrivals: queue.SimpleQueue[_Request[Any] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._num_sessions = 0  # the thread's
        self._reward: Reward
        self._loaded: Future[None] = Future()
        threading.Thread(target=self._serve, args=[load], name="reward").start()

    @classmethod
    async def start(
        cls, load: Callable[[], Reward], queue_limit: int = 64, merge_s: float = 0.002
    ) -> Worker:
        """A worker whose reward was loaded by, and has scored once in, the worker's thread.

        With several sessions open, a batch waits `merge_s` seconds for others to share its pass.
        Raises what `load` raises.
        """
        worker = cls(load, queue_limit, merge_s)
        try:
            await asyncio.wrap_future(worker._loaded)
            await worker.score(_WARM_UP_PROMPT, ["Hello."])
        except BaseException:
            worker.close()
            raise
        return worker

    @property
    def description(self) -> RewardDescription:
        reward = self._reward
        return RewardDescription(reward.name, reward.fingerprint, reward.description)

    async def score(self, prompt: Prompt, texts: Sequence[str], *, whole: bool = True) -> Scores:
        """Finite scores, one per text; `whole`: they are complete answers.

        Raises:
            InvalidRequest: the model cannot take this prompt.
            Overloaded: too many calls are here already.
            RewardInvalid: the reward returned something else.
            Unavailable: the worker is closed.
        """
        candidates = whole_answers(texts)
        if not whole:
            candidates = [Candidate(c.id, c.text, 0, 0.0) for c in candidates]
        async with self.open(prompt) as session:
            return await session.score(candidates)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[WorkerSession]:
        """A session, which frees what it keeps when the context is left.

        Raises as `score` does.
        """
        opening = _Call(partial(self._open, prompt))
        try:
            session = await self._ask(opening)
        except asyncio.CancelledError:
            # It may have been opened all the same.
            opening.future.add_done_callback(self._close_late)
            raise
        try:
            yield WorkerSession(self, session)
        finally:
            self._close_session(session)

    async def score_with(self, session: RewardSession, candidates: Sequence[Candidate]) -> Scores:
        """A session's next batch; raises as `score` does."""
        return await self._ask(_Batch(session, candidates))

    def close(self) -> None:
        """Refuse what waits; the pass under way ends by itself."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._arrivals.put(None)

    async def _ask(self, request: _Request[T]) -> T:
        """Hand it to the thread, if not too much is there already."""
        if not self._room.acquire(blocking=False):
            text = f"reward {self._reward.name}: {self._queue_limit} calls wait already"
            raise Overloaded(text)
        # Runs when the thread is done with it, or when it is given up before the thread begins.
        request.future.add_done_callback(lambda _: self._room.release())
        with self._closing:
            if self._closed:
                request.future.cancel()
                raise Unavailable("the reward is being stopped")
            self._arrivals.put(request)
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.abandoned = True
            raise

    def _close_session(self, session: RewardSession) -> None:
        with self._closing:
            if not self._closed:  # behind what it may still be computing
                self._arrivals.put(_Call(partial(self._close, session)))

    def _close_late(self, opened: Future[RewardSession]) -> None:
        with suppress(BaseException):
            self._close_session(opened.result())

    # What follows is the thread's.

    def _open(self, prompt: Prompt) -> RewardSession:
        session = self._reward.open(prompt)
        self._num_sessions += 1
        return session

    def _close(self, session: RewardSession) -> None:
        self._num_sessions -= 1
        session.close()

    def _serve(self, load: Callable[[], Reward]) -> None:
        """Load, then pass after pass until closed."""
        try:
            # Loaded where it is used: torch's thread count belongs to the thread that sets it.
            self._reward = load()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(None)
        under_way: list[_Batch] = []
        while self._take_in(under_way):
            under_way = [batch for batch in under_way if self._is_wanted(batch)]
            self._compute(under_way)
            under_way = [batch for batch in under_way if not self._is_done(batch)]
        for batch in under_way:
            batch.future.set_exception(Unavailable("the reward is being stopped"))

    def _take_in(self, under_way: list[_Batch]) -> bool:
        """Begin with what has arrived, and wait where nothing is under way; False: closed."""
        until = 0.0  # when others need not be waited for any more
        while True:
            try:
                all_here = len(under_way) >= self._num_sessions
                wait_s = 0.0 if all_here else max(0.0, until - time.monotonic())
                arrived = self._arrivals.get(not under_way or wait_s > 0, wait_s or None)
            except queue.Empty:
                return True
            match arrived:
                case None:
                    return False
                case _Call():
                    _carry_out(arrived)
                case _Batch():
                    if not under_way and self._num_sessions > 1:
                        until = time.monotonic() + self._merge_s
                    under_way += self._begin(arrived)

    def _begin(self, batch: _Batch) -> list[_Batch]:
        """Itself, unless it was given up, or is refused by the reward."""
        if batch.future.set_running_or_notify_cancel():
            try:
                batch.task = batch.session.begin(batch.candidates)
                return [batch]
            except BaseException as error:
                batch.session.close()
                batch.future.set_exception(error)
        return []

    def _is_wanted(self, batch: _Batch) -> bool:
        if batch.abandoned:
            batch.session.close()  # it counts on what will not be computed
            batch.future.set_result(Scores(()))  # nobody looks
        return not batch.abandoned

    def _compute(self, batches: Sequence[_Batch]) -> None:
        """One pass, shared by all; if it fails, each from its beginning, alone: one may be bad."""
        tasks = [batch.task for batch in batches if batch.task]
        try:
            self._reward.compute(take_fairly(tasks, self._reward.token_budget))
        except BaseException as error:
            for batch in batches:
                batch.session.close()
            if len(batches) == 1:
                batches[0].future.set_exception(error)
                return
            for batch in batches:
                self._compute_alone(batch)

    def _compute_alone(self, batch: _Batch) -> None:
        try:
            scores = score_batch(batch.session, self._reward, batch.candidates)
            batch.future.set_result(self._checked(scores, len(batch.candidates)))
        except BaseException as failure:
            batch.future.set_exception(failure)

    def _is_done(self, batch: _Batch) -> bool:
        if not batch.future.done() and batch.task and not batch.task.next_tokens:
            try:
                scores = self._checked(batch.task.scores(), len(batch.candidates))
                batch.future.set_result(scores)
            except BaseException as error:
                batch.session.close()
                batch.future.set_exception(error)
        return batch.future.done()

    def _checked(self, scores: Scores, num_texts: int) -> Scores:
        name = self._reward.name
        if len(scores.values) != num_texts:
            text = f"reward {name} returned {len(scores.values)} scores for {num_texts} texts"
            raise RewardInvalid(text, metadata={"reward": name})
        if not all(math.isfinite(value) for value in scores.values):
            text = f"reward {name} returned a score that is not finite"
            raise RewardInvalid(text, metadata={"reward": name})
        return scores


class WorkerSession:
    """One reward, bound to one prompt; made by `Worker.open`."""

    def __init__(self, worker: Worker, session: RewardSession) -> None:
        self._worker = worker
        self._session = session

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        """Raises Overloaded, RewardInvalid as `Worker.score` does."""
        return await self._worker.score_with(self._session, candidates)


def _carry_out(call: _Call[T]) -> None:
    if call.future.set_running_or_notify_cancel():
        try:
            call.future.set_result(call.do())
        except BaseException as error:
            call.future.set_exception(error)
