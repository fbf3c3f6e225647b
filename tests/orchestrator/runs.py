"""Scorers, requests and calls for the tests of the run loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from orchestrator.loop.run import run
from specrej.contracts import (
    Candidate,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    GeometricSchedule,
    MemorySchedule,
    Prompt,
    Sampling,
    Scorer,
    Scores,
    ScoringSession,
    Selection,
    TokensSchedule,
)

PROMPT = Prompt.from_user("four words of prompt")
SCHEDULES = st.one_of(
    st.just(MemorySchedule()),
    st.builds(
        lambda tokens: TokensSchedule(tuple(sorted(tokens))),
        st.sets(st.integers(1, 50), min_size=1, max_size=6),
    ),
    st.builds(GeometricSchedule, st.integers(1, 20), st.floats(1.1, 4)),
)


class FixedScorer:
    """Returns fixed values, or a value of each candidate, by default the length of its text."""

    def __init__(
        self,
        values: Sequence[float] | Callable[[Candidate], float] = lambda c: float(len(c.text)),
    ) -> None:
        self._values = values
        self.seen: list[int] = []  # ids of finished candidates

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        yield self

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        self.seen += [c.id for c in candidates if c.finish]
        values = [*map(self._values, candidates)] if callable(self._values) else self._values
        return Scores(tuple(values), computed_tokens=len(candidates))


class LetterScorer(FixedScorer):
    """Returns the share of one letter, which differs between candidates and changes over rounds."""

    def __init__(self, letter: str) -> None:
        super().__init__(lambda c: c.text.count(letter) / max(1, len(c.text)))


async def events_of(
    request: GenerationRequest,
    generator: Generator,
    scorer: Scorer | Sequence[Scorer],
    **options: Any,
) -> list[Event]:
    async with aclosing(run(request, generator, scorer, **options)) as events:
        return [event async for event in events]


async def answer(
    request: GenerationRequest,
    generator: Generator,
    scorer: Scorer | Sequence[Scorer],
    **options: Any,
) -> Generation:
    last = (await events_of(request, generator, scorer, **options))[-1]
    assert isinstance(last, Finished)
    return last.generation


def request(n: int = 16, max_tokens: int = 60, **selection: object) -> GenerationRequest:
    fields = replace(Selection(n=n, return_candidates=64), **selection)  # type: ignore[arg-type]
    return GenerationRequest(PROMPT, Sampling(max_tokens=max_tokens), fields)
