"""Generators, scorers, requests and calls for the tests of the run loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from generator_service.toy import ToyGenerator, ToySession
from orchestrator.loop.run import run
from specrej import contracts as c
from specrej.contracts.errors import SpecrejError, Unavailable
from tests.orchestrator.caching import Clock

NEVER = 10**9
PROMPT = c.Prompt.from_user("four words of prompt")
SCHEDULES = st.one_of(
    st.just(c.Schedule("memory")),
    st.builds(
        lambda tokens: c.Schedule("tokens", tokens=tuple(sorted(tokens))),
        st.sets(st.integers(1, 50), min_size=1, max_size=6),
    ),
    st.builds(c.Schedule, first=st.integers(1, 20), factor=st.floats(1.1, 4)),
)


class FaultyGenerator(ToyGenerator):
    """A toy with its own clock, advanced by `token_s` per token; its runs have that clock, too.

    Beyond so many tokens it breaks, with `error`, or hangs.
    """

    def __init__(
        self,
        token_s: float = 0.0,
        breaks_at: int = NEVER,
        hangs_at: int = NEVER,
        error: type[SpecrejError] = Unavailable,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.clock = Clock()
        self.token_s = token_s
        self.breaks_at, self.hangs_at, self.error = breaks_at, hangs_at, error
        self.num_broken = 0  # calls

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[ToySession]:
        async with super().open(spec) as session:
            extend, num_tokens = session.extend, 0

            async def faulty(until_tokens: int, report: c.Report | None = None) -> c.Round:
                nonlocal num_tokens
                until = min(until_tokens, self.breaks_at, self.hangs_at)
                if until < until_tokens:
                    if report and until > num_tokens:
                        part = await extend(until)
                        grown, num_live = part.candidates, len(part.candidates)
                        grown = grown if num_live == 1 else ()
                        report(replace(part, candidates=grown, num_live=num_live))
                    if until == self.hangs_at:
                        await asyncio.Event().wait()
                    self.num_broken += 1
                    raise self.error("gone")
                ended = await extend(until_tokens, report)
                self.clock.now_s += (ended.num_tokens - num_tokens) * self.token_s
                num_tokens = ended.num_tokens
                return ended

            session.extend = faulty  # type: ignore[method-assign]
            yield session


class FixedScorer:
    """Returns fixed values, or a value of each candidate, by default the length of its text."""

    def __init__(
        self,
        values: Sequence[float] | Callable[[c.Candidate], float] = lambda one: float(len(one.text)),
    ) -> None:
        self._values = values
        self.seen: list[int] = []  # ids of finished candidates

    @asynccontextmanager
    async def __call__(self, prompt: c.Prompt) -> AsyncIterator[c.ScoringSession]:
        yield self

    async def score(self, candidates: Sequence[c.Candidate]) -> c.Scores:
        self.seen += [one.id for one in candidates if one.finish]
        values = [*map(self._values, candidates)] if callable(self._values) else self._values
        return c.Scores(tuple(values), computed_tokens=len(candidates))


class FaultyScorer(FixedScorer):
    """Fails at its `batch`-th batch (0: when opened): raises `error`, or without one waits until
    it is cancelled."""

    def __init__(self, batch: int, error: Exception | None = None) -> None:
        super().__init__()
        self.num_waited = self.num_cancelled = 0
        self._left = batch
        self._error = error

    @asynccontextmanager
    async def __call__(self, prompt: c.Prompt) -> AsyncIterator[c.ScoringSession]:
        await self._fail_at_zero()
        yield self

    async def score(self, candidates: Sequence[c.Candidate]) -> c.Scores:
        self._left -= 1
        await self._fail_at_zero()
        return await super().score(candidates)

    async def _fail_at_zero(self) -> None:
        if self._left:
            return
        if self._error:
            raise self._error
        self.num_waited += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1


class LetterScorer(FixedScorer):
    """Returns the share of one letter, which differs between candidates and changes over rounds."""

    def __init__(self, letter: str) -> None:
        super().__init__(lambda one: one.text.count(letter) / max(1, len(one.text)))


async def events_of(
    request: c.GenerationRequest,
    generator: c.Generator,
    scorer: c.Scorer | Sequence[c.Scorer],
    **options: Any,
) -> list[c.Event]:
    if isinstance(generator, FaultyGenerator):
        options.setdefault("clock", generator.clock)
    async with aclosing(run(request, generator, scorer, **options)) as events:
        return [event async for event in events]


async def answer(
    request: c.GenerationRequest,
    generator: c.Generator,
    scorer: c.Scorer | Sequence[c.Scorer],
    **options: Any,
) -> c.Generation:
    last = (await events_of(request, generator, scorer, **options))[-1]
    assert isinstance(last, c.Finished)
    return last.generation


def request(
    n: int = 16,
    max_tokens: int = 60,
    *,
    sampling: Mapping[str, Any] | None = None,
    allow_degraded: bool = False,
    **selection: Any,
) -> c.GenerationRequest:
    return c.GenerationRequest(
        PROMPT,
        c.Sampling(max_tokens, **(sampling or {})),
        c.Selection(**dict[str, Any](n=n, return_candidates=64) | selection),
        allow_degraded=allow_degraded,
    )


REWARDS = st.builds(
    c.WeightedReward,
    st.sampled_from("aeo"),
    st.sampled_from([-1.0, 0.5, 2.0]),
    st.sampled_from([c.Normalization(), c.Normalization("batch")]),
    st.none() | st.floats(0, 0.2),
)
REQUESTS = st.builds(
    request,
    n=st.integers(1, 40),
    max_tokens=st.integers(1, 60),
    alpha=st.sampled_from([0.0, 0.1, 0.5, 0.75, 0.99]),
    schedule=SCHEDULES,
    rewards=st.lists(REWARDS, max_size=3, unique_by=lambda reward: reward.name).map(tuple),
    prefer_complete=st.booleans(),
    branching=st.none()
    | st.builds(
        c.Branching, st.integers(4, 20), st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0])
    ),
)


def check_counts(generation: c.Generation, n: int) -> None:
    """Every candidate is finished or rejected once, and every token is counted once."""
    rounds = generation.rounds
    num_finished = sum(trace.num_finished for trace in rounds)
    num_forks = sum(len(trace.forks) for trace in rounds)
    assert num_finished + sum(trace.num_rejected for trace in rounds) == n + num_forks
    assert len(generation.candidates) == min(64, num_finished)
    assert generation.usage.generated_tokens == sum(trace.generated_tokens for trace in rounds)
    if not num_forks:
        usage = generation.usage
        assert usage.best_of_n_tokens_estimate >= usage.generated_tokens
    for trace in rounds:
        if trace.ended_by is c.RoundEnd.SLOTS_FULL and trace.num_started > 1:
            assert trace.num_rejected + trace.num_finished >= 1
            assert not trace.forks
        # One vetoed candidate may continue if no other is left.
        num_kept = trace.num_live - len(trace.forks)
        assert trace.num_rejected >= trace.num_vetoed - (num_kept <= 1)
