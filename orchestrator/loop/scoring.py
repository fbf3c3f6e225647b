"""Raw scores of candidates: the likelihood, and all rewards of one request together."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

from specrej import fingerprint
from specrej.contracts import Candidate, Prompt, Scorer, Scores, ScoringSession, WeightedReward
from specrej.contracts.errors import (
    InternalError,
    Overloaded,
    RewardInvalid,
    SessionExpired,
    Unavailable,
)
from specrej.threads import all_of

log = logging.getLogger(__name__)

# Whether a reward, by its index, scores a candidate.
Wants: TypeAlias = Callable[[int, Candidate], bool]

# Errors after which the likelihood may replace the rewards.
_REWARD_FAILED = (Unavailable, Overloaded, InternalError, SessionExpired)


class LikelihoodScorer:
    """Scores a candidate by its mean log-likelihood (the paper's self-reward)."""

    @asynccontextmanager
    async def __call__(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        yield self

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(candidate.mean_logprob for candidate in candidates))


@dataclass(frozen=True, slots=True)
class RawScores:
    """One tuple per candidate, with one value per reward, before normalisation and weights; NaN
    where a reward has not scored a candidate.

    `fingerprints` are the rewards' own, "" where a reward sends none, all empty while one has not
    scored yet. With `is_fallback` the values are likelihoods, one per candidate.
    """

    values: tuple[tuple[float, ...], ...]
    computed_tokens: int = 0
    fingerprints: tuple[str, ...] = ()
    is_fallback: bool = False
    compare: frozenset[int] = frozenset()  # rewards that compare the candidates of a batch only


@dataclass(eq=False, slots=True)
class RequestScorer:
    """Scores the candidates of one prompt with all rewards of a request, concurrently.

    Use as a context manager: the rewards' sessions are open while the context lasts. After a
    failure, with `may_fall_back`, the likelihood replaces the rewards for the rest of the request,
    because values of two kinds cannot be compared.
    """

    scorers: Sequence[Scorer]  # at least one
    prompt: Prompt
    read: Callable[[str], str] | None = None  # what of a text they score; None: all
    may_fall_back: bool = False
    patience_s: float = math.inf  # the longest wait for their opening
    is_late: bool = False  # whether it fell back because the time was short
    _exit: AsyncExitStack = field(default_factory=AsyncExitStack)
    _sessions: list[ScoringSession] = field(default_factory=list)  # empty after a fallback
    _fingerprints: dict[int, str] = field(default_factory=dict)  # by the index of the reward

    async def __aenter__(self) -> Self:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.patience_s):
                    for scorer in self.scorers:
                        session = await stack.enter_async_context(scorer(self.prompt.question))
                        self._sessions.append(session)
                self._exit = stack.pop_all()
        except (*_REWARD_FAILED, TimeoutError) as error:
            self._fall_back(error)
        return self

    async def __aexit__(self, *error: Any) -> None:
        # The error is passed on: after one, sessions end without a final exchange.
        await self._exit.__aexit__(*error)

    async def score(
        self,
        candidates: Sequence[Candidate],
        patience_s: float = math.inf,
        wants: Wants = lambda _reward, _candidate: True,
    ) -> RawScores:
        """Raw scores of the candidates, after at most `patience_s` seconds; NaN by rewards that do
        not want a candidate.

        Raises:
            RewardInvalid: a score is missing or not finite, and there is no fallback.
            TimeoutError: the rewards took longer; the caller may have no need for the fallback.
        """
        if self._sessions:
            try:
                async with asyncio.timeout(patience_s):
                    return await self._scored(self._begun(candidates), wants)
            except _REWARD_FAILED as error:
                self._fall_back(error)
        return _likelihoods(candidates)

    async def _scored(self, candidates: Sequence[Candidate], wants: Wants) -> RawScores:
        wanted = {
            number: [at for at, one in enumerate(candidates) if wants(number, one)]
            for number in range(len(self._sessions))
        }
        wanted = {number: places for number, places in wanted.items() if places}
        # If one fails, the others end before their sessions close.
        parts = await all_of(
            checked(self._sessions[n], [candidates[at] for at in places])
            for n, places in wanted.items()
        )
        columns = [[math.nan] * len(candidates) for _ in self._sessions]
        for (number, places), part in zip(wanted.items(), parts, strict=True):
            self._fingerprints[number] = part.fingerprint
            for at, value in zip(places, part.values, strict=True):
                columns[number][at] = value
        known = [self._fingerprints.get(number) for number in range(len(columns))]
        return RawScores(
            tuple(zip(*columns, strict=True)),
            sum(part.computed_tokens for part in parts),
            () if None in known else tuple(str(one) for one in known),
            compare=frozenset(n for n, part in zip(wanted, parts, strict=True) if part.compare),
        )

    def _begun(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates with what is scored of their texts, after the text that they continue."""
        before, read = self.prompt.beginning, self.read
        if not (before or read):
            return candidates
        return [replace(c, text=before + (read(c.text) if read else c.text)) for c in candidates]

    def replaced(self, candidates: Sequence[Candidate], error: Exception) -> RawScores:
        """The likelihoods in place of late scores, or of an invalid sum; raises `error` if not
        allowed."""
        self._fall_back(error)
        return _likelihoods(candidates)

    def _fall_back(self, error: Exception) -> None:
        """Replace the rewards by the likelihood, or raise the error again."""
        if not self.may_fall_back:
            raise error
        log.warning("a reward failed (%s): ranking by likelihood", type(error).__name__)
        self._sessions, self.is_late = [], isinstance(error, TimeoutError)


def _likelihoods(candidates: Sequence[Candidate]) -> RawScores:
    values = tuple((candidate.mean_logprob,) for candidate in candidates)
    return RawScores(values, is_fallback=True)


async def checked(session: ScoringSession, candidates: Sequence[Candidate]) -> Scores:
    """Scores of one reward.

    Raises:
        RewardInvalid: their number differs from the candidates', or one is not finite.
    """
    scores = await session.score(candidates)
    if len(scores.values) != len(candidates):
        raise RewardInvalid(f"{len(scores.values)} scores for {len(candidates)} candidates")
    if not all(map(math.isfinite, scores.values)):
        raise RewardInvalid("a score is not finite")
    return scores


def fingerprint_of(rewards: tuple[WeightedReward, ...], fingerprints: tuple[str, ...]) -> str:
    """Fingerprint of weighted rewards together, independent of their order. Without their data:
    callers see it, and could find a short reference by trying."""
    pairs = zip((replace(reward, data="") for reward in rewards), fingerprints, strict=True)
    return fingerprint.of_values(rewards={reward.name: [reward, own] for reward, own in pairs})
