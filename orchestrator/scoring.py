"""Rewards as the run loop sees them: the generator's own likelihood, and a panel of several."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from types import TracebackType

from orchestrator.composition import Verdict, combine
from specrej import fingerprint
from specrej.contracts import Candidate, Prompt, Scorer, Scores, ScoringSession, WeightedReward
from specrej.errors import InternalError, Overloaded, RewardInvalid, SessionExpired, Unavailable

log = logging.getLogger(__name__)


class LikelihoodScorer:
    """The paper's self-reward: mean log-likelihood, which the generator knows already."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        yield self

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(candidate.mean_logprob for candidate in candidates))


@dataclass(frozen=True, slots=True)
class Ratings:
    """Raw values per candidate, in the order asked, of every scorer; and the tokens computed.

    `instead`: where the likelihood stands in for them, that of all candidates, by id.
    `fingerprints`: of the scorers, in their order; "" where one is not told.
    """

    values: tuple[tuple[float, ...], ...]
    computed_tokens: int
    instead: Mapping[int, tuple[float, ...]] | None = None
    fingerprints: tuple[str, ...] = ()


class Panel:
    """Several scorers that are opened together and asked at the same time."""

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        """`scorers`: at least one."""
        self._scorers = tuple(scorers)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[PanelSession]:
        async with AsyncExitStack() as stack:
            yield PanelSession(
                [await stack.enter_async_context(scorer.open(prompt)) for scorer in self._scorers]
            )


class PanelSession:
    """A panel's scoring sessions, bound to one prompt."""

    def __init__(self, sessions: Sequence[ScoringSession]) -> None:
        self._sessions = sessions

    async def rate(self, candidates: Sequence[Candidate]) -> Ratings:
        """What every scorer says of every candidate.

        Raises:
            RewardInvalid: one of them talks rubbish.
        """
        # Not a TaskGroup: it would hide which error a caller must be told in an ExceptionGroup.
        asked = [asyncio.ensure_future(checked(each, candidates)) for each in self._sessions]
        try:
            parts = await asyncio.gather(*asked)
        finally:
            # Where one fails the others would go on, and open sessions that nobody closes.
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)
        values = tuple(zip(*(part.values for part in parts), strict=True))
        return Ratings(
            values,
            sum(part.computed_tokens for part in parts),
            fingerprints=tuple(part.fingerprint for part in parts),
        )


# What a reward that cannot be had fails with; TimeoutError: not while there is time.
_REWARD_GONE = (Unavailable, Overloaded, InternalError, SessionExpired, TimeoutError)


class Jury:
    """A panel's sessions for one prompt; the likelihood where they fail and that is allowed.

    Once it has stood in it stays: values of two kinds cannot be held against each other.
    """

    def __init__(self, panel: Panel, prompt: Prompt, *, may_fall_back: bool) -> None:
        self._panel = panel
        self._prompt = prompt
        self._may_fall_back = may_fall_back
        self._exit = AsyncExitStack()
        self._session: PanelSession | None = None

    async def __aenter__(self) -> Jury:
        try:
            self._session = await self._exit.enter_async_context(self._panel.open(self._prompt))
        except _REWARD_GONE:
            self._fall_back()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        # With the error: a session that is given up half-way does not wait for a goodbye.
        await self._exit.__aexit__(kind, error, frames)

    async def rate(
        self,
        candidates: Sequence[Candidate],
        everyone: Iterable[Candidate],
        patience_s: float | None = None,
    ) -> Ratings:
        """What the panel says of the candidates; `everyone`: all known ones, as of now.

        `patience_s`: how long the panel may take; None: for ever.

        Raises:
            TimeoutError: it took longer, and the likelihood may not stand in.
        """
        if self._session:
            try:
                async with asyncio.timeout(patience_s):
                    return await self._session.rate(candidates)
            except _REWARD_GONE:
                self._fall_back()
        return Ratings(
            tuple((candidate.mean_logprob,) for candidate in candidates),
            0,
            {candidate.id: (candidate.mean_logprob,) for candidate in everyone},
        )

    def _fall_back(self) -> None:
        """From the handler of what failed, which is raised again where it must be."""
        if not self._may_fall_back:
            raise
        log.warning("a reward cannot be had: ranking by likelihood")
        self._session = None


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


def fingerprint_of(rewards: Sequence[WeightedReward], fingerprints: Sequence[str]) -> str:
    """Of all rewards together, whatever their order: each with its weight and its own one."""
    told = zip(rewards, fingerprints, strict=True)
    return fingerprint.of_values(rewards={each.name: [asdict(each), own] for each, own in told})


def judged(
    values: Mapping[int, Sequence[float]], rewards: Sequence[WeightedReward]
) -> dict[int, Verdict]:
    """`combine`, with scores that are finite.

    Raises:
        RewardInvalid: one is not: finite values whose weighted sum is too large.
    """
    verdicts = combine(values, rewards)
    if not all(math.isfinite(verdict.score) for verdict in verdicts.values()):
        raise RewardInvalid("a combined score is not finite")
    return verdicts
