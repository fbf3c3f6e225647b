"""Rewards as the run loop sees them: the generator's own likelihood, and weighted sums."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from specrej.contracts import Candidate, Prompt, Scorer, Scores, ScoringSession
from specrej.errors import RewardInvalid

LIKELIHOOD = "likelihood"


class LikelihoodScorer:
    """The paper's self-reward: mean log-likelihood, which the generator knows already."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        yield self

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(candidate.mean_logprob for candidate in candidates))


class WeightedScorer:
    """The weighted sum of several rewards, asked at the same time."""

    def __init__(self, parts: Sequence[tuple[Scorer, float]]) -> None:
        """`parts`: scorers and their weights, at least one."""
        self._parts = tuple(parts)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        async with AsyncExitStack() as stack:
            sessions = [
                (await stack.enter_async_context(scorer.open(prompt)), weight)
                for scorer, weight in self._parts
            ]
            yield _WeightedSession(sessions)


class _WeightedSession:
    def __init__(self, sessions: Sequence[tuple[ScoringSession, float]]) -> None:
        self._sessions = sessions

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        # Not a TaskGroup: it would hide which error a caller must be told in an ExceptionGroup.
        parts = await asyncio.gather(*(checked(each, candidates) for each, _ in self._sessions))
        weights = [weight for _, weight in self._sessions]
        totals = tuple(
            # Exactly rounded, so that the order of the rewards does not matter.
            math.fsum(weight * value for weight, value in zip(weights, values, strict=True))
            for values in zip(*(part.values for part in parts), strict=True)
        )
        return Scores(totals, sum(part.computed_tokens for part in parts))


async def checked(session: ScoringSession, candidates: Sequence[Candidate]) -> Scores:
    """Scores that are finite and as many as asked for; never ranks by rubbish.

    Raises:
        RewardInvalid: they are not.
    """
    scores = await session.score(candidates)
    if len(scores.values) != len(candidates):
        raise RewardInvalid(f"{len(scores.values)} scores for {len(candidates)} candidates")
    if not all(map(math.isfinite, scores.values)):
        raise RewardInvalid("a score is not finite")
    return scores
