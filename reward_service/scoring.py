"""What serves one reward: a thread of this process or another server. Imports no torch, no grpc."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from reward_service.reward import Described, whole_answers
from specrej.contracts import Candidate, Prompt, RewardDescription, Scores
from specrej.contracts.errors import Overloaded, RewardInvalid, Unavailable
from specrej.contracts.validation import MAX_BATCH
from specrej.telemetry import metrics, names

_WARM_UP_PROMPT = Prompt.from_user("Hello?")

# Scores the candidates of one prompt, in their order.
Score = Callable[[Sequence[Candidate]], Awaitable[Scores]]


class RewardWorker(ABC):
    """Serves one reward to any number of callers."""

    max_batch = MAX_BATCH  # candidates that it takes at once

    @property
    @abstractmethod
    def reward(self) -> Described:
        """The reward, once it is loaded."""

    @abstractmethod
    def open(
        self, prompt: Prompt, *, once: bool = False
    ) -> AbstractAsyncContextManager[WorkerSession]:
        """A session, which frees what it keeps when the context is left; `once`: for one batch.

        Raises as `score` does.
        """

    @abstractmethod
    def close(self) -> None:
        """Refuse new calls; what is under way is completed, see `join`."""

    @abstractmethod
    async def join(self, timeout_s: float) -> None:
        """Wait for what is under way, after `close`."""

    def heartbeat_s(self) -> float:
        """Seconds since this process last made progress with the reward; 0 while it has no work."""
        return 0.0

    @property
    def description(self) -> RewardDescription:
        reward = self.reward
        return RewardDescription(reward.name, reward.fingerprint, reward.description)

    async def score(self, prompt: Prompt, texts: Sequence[str], *, whole: bool = True) -> Scores:
        """Finite scores, one per text; `whole`: they are complete answers.

        Raises:
            InvalidRequest: the model cannot take this prompt.
            Overloaded: too many calls wait or run already.
            RewardInvalid: the reward returned something else.
            Unavailable: the worker is closed, or the reward's server does not answer.
        """
        candidates = whole_answers(texts)
        if not whole:
            candidates = [Candidate(c.id, c.text, 0, 0.0) for c in candidates]
        async with self.open(prompt, once=True) as session:
            return await session.score(candidates)

    async def warm_up(self) -> None:
        """Score once."""
        await self.score(_WARM_UP_PROMPT, ["Hello."])


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """One reward, bound to one prompt; made by `RewardWorker.open`."""

    _name: str
    _score: Score

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        """Raises as `RewardWorker.score` does."""
        began, label = time.perf_counter(), {names.REWARD: self._name}
        scores = await self._score(candidates)
        self._check(scores, len(candidates))
        metrics.record(names.REWARD_DURATION, time.perf_counter() - began, **label)
        metrics.record(names.REWARD_BATCH, len(candidates), **label)
        metrics.add(names.REWARD_TOKENS, scores.computed_tokens, **label)
        return scores

    def _check(self, scores: Scores, num_texts: int) -> None:
        num_scores, metadata = len(scores.values), {"reward": self._name}
        if num_scores != num_texts:
            text = f"reward {self._name} returned {num_scores} scores for {num_texts} texts"
            raise RewardInvalid(text, metadata=metadata)
        if not all(map(math.isfinite, scores.values)):
            text = f"reward {self._name} returned a score that is not finite"
            raise RewardInvalid(text, metadata=metadata)


def queue_full(name: str, limit: int) -> Overloaded:
    """The error of a call beyond the limit."""
    return Overloaded(f"reward {name}: {limit} calls wait already")


def worker_closed() -> Unavailable:
    """The error of a call to a closed worker."""
    return Unavailable("the reward is being stopped")
