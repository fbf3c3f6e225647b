"""One reward in a thread of its own: batches of all sessions, merged, behind a bounded queue.

Keeps torch and tokenisers off the event loop, and checks what a reward returns. The thread computes
pass after pass; before each it takes in what has arrived, drops whom nobody waits for, and gives
every batch under way its part of the pass. Knows no wire and no torch; imports without grpc.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from reward_service.batching import take_fairly
from reward_service.reward import Reward, RewardSession, ScoringTask, whole_answers
from specrej.contracts import Candidate, Prompt, RewardDescription, Scores
from specrej.errors import Overloaded, RewardInvalid, Unavailable
from specrej.telemetry import metrics, names
from specrej.threads import ComputeThread, settle

log = logging.getLogger(__name__)

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
    given: int = 0  # tokens of its task that were in passes so far
    is_alone: bool = False  # shares no pass any more: one that it had a part in failed


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
        self._dead = False  # the thread has ended, and not because it was closed
        self._num_sessions = 0  # the thread's
        self._pass_began: float | None = None
        self._reward: Reward
        self._loaded: Future[None] = Future()
        self._thread = ComputeThread("reward", self._serve, load)
        self._thread.start()

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
        async with self.open(prompt, once=True) as session:
            return await session.score(candidates)

    @asynccontextmanager
    async def open(self, prompt: Prompt, *, once: bool = False) -> AsyncIterator[WorkerSession]:
        """A session, which frees what it keeps when the context is left; `once`: of one batch.

        Raises as `score` does.
        """
        opening = _Call(partial(self._open, prompt, once))
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
        began, label = time.perf_counter(), {names.REWARD: self._reward.name}
        scores = await self._ask(_Batch(session, candidates))
        metrics.record(names.REWARD_DURATION, time.perf_counter() - began, **label)
        metrics.record(names.REWARD_BATCH, len(candidates), **label)
        metrics.add(names.REWARD_TOKENS, scores.computed_tokens, **label)
        return scores

    def close(self) -> None:
        """Refuse what waits; the pass under way ends by itself, see `join`."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._arrivals.put(None)

    def heartbeat_s(self) -> float:
        """Seconds that the pass under way takes already; 0 between passes, infinite without a
        thread that could take one."""
        began = self._pass_began
        if self._dead or (not self._thread.is_alive() and not self._closed):
            return math.inf
        return time.monotonic() - began if began is not None else 0.0

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the pass under way, after `close`."""
        self._thread.join(timeout_s)

    async def _ask(self, request: _Request[T]) -> T:
        """Hand it to the thread, if not too much is there already."""
        if not self._room.acquire(blocking=False):
            text = f"reward {self._reward.name}: {self._queue_limit} calls wait already"
            raise Overloaded(text)
        metrics.add(names.REWARD_QUEUED, 1, reward=self._reward.name)
        # Runs when the thread is done with it, or when it is given up before the thread begins.
        request.future.add_done_callback(self._make_room)
        with self._closing:
            if self._closed or self._dead:
                request.future.cancel()
                raise _gone()
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
            if not (self._closed or self._dead):  # behind what it may still be computing
                self._arrivals.put(_Call(partial(self._close, session)))

    def _close_late(self, opened: Future[RewardSession]) -> None:
        with suppress(BaseException):
            self._close_session(opened.result())

    # What follows is the thread's.

    def _open(self, prompt: Prompt, once: bool) -> RewardSession:
        session = self._reward.open(prompt, once=once)
        self._num_sessions += 1
        return session

    def _close(self, session: RewardSession) -> None:
        self._num_sessions -= 1
        session.close()

    def _serve(self, load: Callable[[], Reward]) -> None:
        """Load, then pass after pass until closed."""

        def loading() -> None:
            # Where it is used: torch's thread count belongs to the thread that sets it.
            self._reward = load()

        if not settle(self._loaded, loading):
            return
        under_way: list[_Batch] = []
        try:
            self._work(under_way)
        except BaseException:
            # A bug of ours, or of a reward where none may be. Who waits must be told.
            log.critical("the thread of reward %s ends", self._reward.name, exc_info=True)
        with self._closing:
            self._dead = not self._closed  # from here on nobody asks any more
        for request in (*under_way, *self._unanswered()):
            _fail(request, _gone())

    def _work(self, under_way: list[_Batch]) -> None:
        """Pass after pass until closed; `under_way` are those that are not done."""
        while self._take_in(under_way):
            under_way[:] = [batch for batch in under_way if self._is_wanted(batch)]
            self._pass_began = time.monotonic()
            self._compute(under_way)
            self._pass_began = None
            under_way[:] = [batch for batch in under_way if not self._is_done(batch)]

    def _unanswered(self) -> Iterator[_Request[Any]]:
        """What has arrived and was not looked at."""
        with suppress(queue.Empty):
            while True:
                if request := self._arrivals.get_nowait():
                    yield request

    def _take_in(self, under_way: list[_Batch]) -> bool:
        """Begin with what has arrived, and wait where nothing is under way; False: closed.

        What arrives meanwhile is for the next pass: nobody can keep the passes from going on.
        """
        until = 0.0  # when others need not be waited for any more
        left = self._arrivals.qsize()
        while True:
            all_here = len(under_way) >= self._num_sessions
            wait_s = 0.0 if all_here else max(0.0, until - time.monotonic())
            if under_way and left <= 0 and not wait_s:
                return True
            try:
                arrived = self._arrivals.get(not under_way or wait_s > 0, wait_s or None)
            except queue.Empty:
                return True
            left -= 1
            match arrived:
                case None:
                    return False
                case _Call():
                    _carry_out(arrived)
                case _Batch():
                    if not under_way and self._num_sessions > 1:
                        until = time.monotonic() + self._merge_s
                    # Nobody catches up at the others' expense.
                    arrived.given = min((batch.given for batch in under_way), default=0)
                    if arrived.future.set_running_or_notify_cancel() and _begin(arrived):
                        under_way.append(arrived)

    def _is_wanted(self, batch: _Batch) -> bool:
        wanted = not batch.abandoned  # read once: it is set by another thread
        if not wanted:
            batch.session.close()  # it counts on what will not be computed
            batch.future.set_result(Scores(()))  # nobody looks
        return wanted

    def _compute(self, batches: Sequence[_Batch]) -> None:
        """One pass, shared by all but those that are to be alone.

        If it fails, those that took part begin anew, each alone: one of them may be bad.
        """
        alone = next((batch for batch in batches if batch.is_alone), None)
        sharing = [alone] if alone else batches
        before = [batch.given for batch in sharing]
        given = list(before)
        try:
            tasks = [batch.task for batch in sharing if batch.task]
            if pieces := take_fairly(tasks, self._reward.token_budget, given):
                self._reward.compute(pieces)
        except BaseException as error:
            took_part = [b for b, x, y in zip(sharing, before, given, strict=True) if y > x]
            for batch in took_part or sharing:
                batch.session.close()
                if len(took_part or sharing) == 1:
                    _fail(batch, error)
                else:
                    batch.is_alone = True
                    _begin(batch)
        for batch, tokens in zip(sharing, given, strict=True):
            batch.given = tokens

    def _is_done(self, batch: _Batch) -> bool:
        if not batch.future.done() and batch.task and not batch.task.next_tokens:
            try:
                scores = self._checked(batch.task.scores(), len(batch.candidates))
                batch.future.set_result(scores)
            except BaseException as error:
                batch.session.close()
                _fail(batch, error)
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


def _begin(batch: _Batch) -> bool:
    """Whether its reward takes it."""
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
    # Asyncio's futures refuse a StopIteration, and who waits for one would wait for ever; what is
    # no `Exception`, such as a SystemExit in a user's function, would end the event loop.
    if isinstance(error, StopIteration) or not isinstance(error, Exception):
        strange = RuntimeError(f"a reward raised {type(error).__name__}")
        strange.__cause__ = error
        error = strange
    with suppress(InvalidStateError):  # it is over already, or given up
        request.future.set_exception(error)


def _gone() -> Unavailable:
    return Unavailable("the reward is being stopped")
