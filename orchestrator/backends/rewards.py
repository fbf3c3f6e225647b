"""All reward services as one: places scoring sessions, and moves them when one is lost.

A scoring session moves without loss: every batch has the whole texts, and what the lost service had
kept of them is computed again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from orchestrator.backends.fleet import Backend, Fleet
from orchestrator.backends.placement import order, prefix_of
from orchestrator.remote import RemoteRewards
from specrej.contracts import Candidate, Prompt, RewardDescription, Scores, ScoringSession
from specrej.errors import Overloaded, SpecrejError, Unavailable

_Backend = Backend[RemoteRewards]


class FleetRewards:
    """The rewards that all reward services serve."""

    def __init__(
        self, fleet: Fleet[RemoteRewards], draw: Callable[[], float] = random.random
    ) -> None:
        """`draw`: from [0, 1)."""
        self._fleet = fleet
        self._draw = draw

    def scorer(self, name: str) -> FleetScorer:
        """A `Scorer` for the reward of that name."""
        return FleetScorer(name, self._fleet, self._ranked)

    async def describe(self) -> tuple[RewardDescription, ...]:
        """The rewards that are served, as of now; the first is the default.

        Raises:
            SpecrejError: why there are none.
        """
        members = await self._fleet.refreshed()
        if not members:
            raise self._fleet.failure()
        served: tuple[RewardDescription, ...] = members[0].description
        return served

    def _ranked(self, prompt: Prompt) -> list[_Backend]:
        members = self._fleet.members()
        if not members:
            return self._fleet.others()
        by_address = {each.target.address: each for each in members}
        loads = {address: float(each.running) for address, each in by_address.items()}
        return [by_address[at] for at in order(prefix_of(prompt, ""), loads, self._draw)]


class FleetScorer:
    """A `Scorer` at whichever service is the best place."""

    def __init__(
        self,
        name: str,
        fleet: Fleet[RemoteRewards],
        ranked: Callable[[Prompt], list[_Backend]],
    ) -> None:
        self._name = name
        self._fleet = fleet
        self._ranked = ranked

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        async with _MovingScoring(self._name, prompt, self._fleet, self._ranked) as session:
            yield session


# The second time finds one that has been started again, or has only dropped the session.
_TRIES = 2


class _MovingScoring:
    """A `ScoringSession` that goes on elsewhere, with the same rewards; everybody is asked twice at
    most."""

    def __init__(
        self,
        name: str,
        prompt: Prompt,
        fleet: Fleet[RemoteRewards],
        ranked: Callable[[Prompt], list[_Backend]],
    ) -> None:
        self._name = name
        self._prompt = prompt
        self._fleet = fleet
        self._ranked = ranked
        self._stack = AsyncExitStack()  # of the place where it is
        self._tries: Counter[_Backend] = Counter()
        # Set on entering.
        self._backend: _Backend
        self._session: ScoringSession
        self._version: Hashable

    async def __aenter__(self) -> Self:
        """Raises Unavailable, Overloaded: there is nowhere to go."""
        await self._place(self._ranked(self._prompt))
        self._version = self._backend.version
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        return await self._stack.__aexit__(*error)  # type: ignore[arg-type]

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        while True:
            try:
                async with self._backend.answering():
                    return await self._session.score(candidates)
            except (Unavailable, Overloaded) as failure:
                # Without a goodbye.
                await self._stack.__aexit__(type(failure), failure, failure.__traceback__)
                try:
                    await self._place(self._left())
                except SpecrejError:
                    raise failure from None

    def _left(self) -> list[_Backend]:
        """Where it may go on."""
        ranked = [
            each
            for each in self._ranked(self._prompt)
            if each.version == self._version and self._tries[each] < _TRIES
        ]
        return sorted(ranked, key=self._tries.__getitem__)

    async def _place(self, ranked: Sequence[_Backend]) -> None:
        self._session = await self._fleet.first(ranked, self._enter)

    async def _enter(self, backend: _Backend) -> ScoringSession:
        self._tries[backend] += 1
        self._backend = backend
        scorer = backend.peer.scorer(self._name)
        holding = backend.holding(scorer.open(self._prompt))
        return await self._stack.enter_async_context(holding)
