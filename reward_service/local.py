"""Rewards as the contract's `Scorer`, in this process; imports without grpc or torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from reward_service.worker import Worker
from specrej.contracts import Candidate, Prompt, Scores


class LocalScorer:
    """One worker's reward."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[LocalScoringSession]:
        """A session that keeps nothing but the prompt."""
        yield LocalScoringSession(self._worker, prompt)


class LocalScoringSession:
    """One reward, bound to one prompt."""

    def __init__(self, worker: Worker, prompt: Prompt) -> None:
        self._worker = worker
        self._prompt = prompt

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        """Raises Overloaded, RewardInvalid as `Worker.score` does."""
        return await self._worker.score(self._prompt, [candidate.text for candidate in candidates])
