"""One reward in a thread of its own, behind a bounded queue.

Keeps torch and tokenisers off the event loop, and checks what a reward returns. Knows no wire and
no torch; imports without grpc.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import ParamSpec, TypeVar

from reward_service.reward import Reward, RewardSession, open_session
from specrej.contracts import Candidate, Prompt, RewardDescription, Scores
from specrej.errors import Overloaded, RewardInvalid

P = ParamSpec("P")
T = TypeVar("T")

_WARM_UP_PROMPT = Prompt.from_user("Hello?")


class Worker:
    """Scores with one reward, one call at a time; `queue_limit` more may wait.

    Made by `start`. A call that is cancelled while it waits is never computed.
    """

    def __init__(self, reward: Reward, thread: ThreadPoolExecutor, queue_limit: int) -> None:
        self._reward = reward
        self._thread = thread
        self._queue_limit = queue_limit
        self._room = threading.Semaphore(queue_limit + 1)

    @classmethod
    async def start(cls, load: Callable[[], Reward], queue_limit: int = 64) -> Worker:
        """A worker whose reward was loaded by, and has scored once in, the worker's thread.

        Raises what `load` raises.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        try:
            # Loaded where it is used: torch's thread count belongs to the thread that sets it.
            reward = await asyncio.get_running_loop().run_in_executor(thread, load)
            worker = cls(reward, thread, queue_limit)
            await worker.score(_WARM_UP_PROMPT, ["Hello."])
        except BaseException:
            thread.shutdown(wait=False, cancel_futures=True)
            raise
        return worker

    @property
    def description(self) -> RewardDescription:
        reward = self._reward
        return RewardDescription(reward.name, reward.fingerprint, reward.description)

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> Scores:
        """Finite scores, one per text.

        Raises:
            Overloaded: too many calls wait already.
            RewardInvalid: the reward returned something else.
        """
        return self._checked(await self._run(self._reward.score, prompt, texts), len(texts))

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[WorkerSession]:
        """A session, which frees what it keeps when the context is left.

        Raises:
            Overloaded: too many calls wait already.
            InvalidRequest: the model cannot take this prompt.
        """
        session = await self._run(open_session, self._reward, prompt)
        try:
            yield WorkerSession(self, session)
        finally:
            # Behind what the session may still be computing; without a thread, nothing is kept.
            with suppress(RuntimeError):
                self._thread.submit(session.close)

    async def score_with(self, session: RewardSession, candidates: Sequence[Candidate]) -> Scores:
        """A session's next batch; raises as `score` does."""
        return self._checked(await self._run(session.score, candidates), len(candidates))

    async def _run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call in the reward's thread, if not too many calls wait for it."""
        if not self._room.acquire(blocking=False):
            text = f"reward {self._reward.name}: {self._queue_limit} calls wait already"
            raise Overloaded(text)
        job = self._thread.submit(call, *args, **options)
        # Runs when the job ends or is cancelled in the queue, not when its caller gives up.
        job.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Drop what waits; a running call ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

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
