"""All reward services as one: places scoring sessions, and moves them when a service is lost.

A scoring session moves without loss: every batch has the whole texts, and the next service computes
again what the lost one had cached.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

from orchestrator.backends.fleet import Backend, Fleet
from specrej.contracts import Candidate, Prompt, RewardDescription, Scores, ScoringSession
from specrej.contracts.errors import Overloaded, SpecrejError, Unavailable
from specrej.remote import RemoteRewards

_Backend = Backend[RemoteRewards]

# Attempts per service of one scoring session: the second may reach a service that was restarted.
_MAX_TRIES = 2


@dataclass(frozen=True, slots=True)
class FleetRewards:
    """The rewards of all reward services."""

    fleet: Fleet[RemoteRewards]
    _draw: Callable[[], float] = random.random  # from [0, 1)

    def open(self, name: str, prompt: Prompt, data: str = "") -> FailoverScoringSession:
        """A session of the reward of that name, at the best service."""
        return FailoverScoringSession(self, name, prompt, data)

    async def describe(self) -> tuple[RewardDescription, ...]:
        """The rewards of all services, as of the latest reports; the first is the default.

        Raises:
            SpecrejError: no service serves.
        """
        return self.fleet.combined(together)

    def ranked(self) -> Iterable[_Backend]:
        """The services, the best place for a session first."""
        return self.fleet.ranked(lambda backend: float(backend.running), self._draw)


def together(services: Sequence[Sequence[RewardDescription]]) -> tuple[RewardDescription, ...]:
    """Each reward as of the first service that has it, with the least of their `max_batch`."""
    by_name: dict[str, list[RewardDescription]] = {}
    for reward in chain.from_iterable(services):
        by_name.setdefault(reward.name, []).append(reward)
    return tuple(
        replace(same[0], max_batch=min(reward.max_batch for reward in same))
        for same in by_name.values()
    )


class FailoverScoringSession:
    """A `ScoringSession` that continues at another service with the same rewards."""

    def __init__(self, rewards: FleetRewards, name: str, prompt: Prompt, data: str) -> None:
        self._rewards = rewards
        self._name = name
        self._prompt = prompt
        self._data = data
        self._stack = AsyncExitStack()  # of the current session
        self._tries: Counter[_Backend] = Counter()
        # Set on entering.
        self._backend: _Backend
        self._session: ScoringSession
        self._version: Hashable

    async def __aenter__(self) -> Self:
        """Raises Unavailable, Overloaded, NotFound: no service can open a session."""
        await self._place(self._rewards.ranked())
        self._version = self._backend.version
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        while True:
            try:
                async with self._backend.answering():
                    scores = await self._session.score(candidates)
                self._tries = Counter({self._backend: 1})  # each failure has tries of its own
                return scores
            except (Unavailable, Overloaded) as failure:
                # With the error: the lost session ends without a final exchange.
                await self._stack.__aexit__(type(failure), failure, failure.__traceback__)
                try:
                    await self._place(self._remaining())
                except SpecrejError:
                    raise failure from None

    def _remaining(self) -> list[_Backend]:
        """Services that may continue the session, the least tried first."""
        ranked = [
            backend
            for backend in self._rewards.ranked()
            if backend.version == self._version and self._tries[backend] < _MAX_TRIES
        ]
        return sorted(ranked, key=self._tries.__getitem__)

    async def _place(self, ranked: Iterable[_Backend]) -> None:
        self._session = await self._rewards.fleet.first(ranked, self._enter)

    async def _enter(self, backend: _Backend) -> ScoringSession:
        self._tries[backend] += 1
        self._backend = backend
        opening = backend.peer.open(self._name, self._prompt, self._data)
        return await self._stack.enter_async_context(backend.holding(opening))
