"""All generators as one `Generator`: places sessions, moves what is lost, splits what is large.

Knows no scores. Who gets what is `placement.py`, who is there `fleet.py`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from orchestrator.backends.fleet import Fleet
from orchestrator.backends.placement import order, prefix_of
from orchestrator.backends.sessions import (
    GeneratorBackend,
    MovingSession,
    Opening,
    PlacedSession,
    placed,
)
from orchestrator.backends.split import SLOTS_EXCEEDED, Rooms, SplitSession, sizes, together
from orchestrator.remote import RemoteGenerator
from specrej.contracts import GeneratorDescription, Prompt, Sampling, Session
from specrej.errors import InvalidRequest, Unavailable

# Sessions' worth of load: more than any generator has.
_FULL = 1e6


class FleetGenerator:
    """A `Generator` made of all that there are."""

    def __init__(
        self, fleet: Fleet[RemoteGenerator], draw: Callable[[], float] = random.random
    ) -> None:
        """`draw`: from [0, 1)."""
        self._fleet = fleet
        self._draw = draw

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AsyncIterator[Session]:
        opening = Opening(prompt, n, sampling, first_round_tokens, cache_salt, first_candidate)
        async with AsyncExitStack() as stack:
            yield await self._enter(stack, opening)

    async def describe(self) -> GeneratorDescription:
        """All that could serve a request together, as of now.

        Raises:
            SpecrejError: why there is nobody.
        """
        members = await self._fleet.refreshed()
        if not members:
            raise self._fleet.failure()
        return _all_of([member.description for member in members])

    async def _enter(self, stack: AsyncExitStack, opening: Opening) -> Session:
        """A session at one generator; at several if no single one could ever hold it."""
        try:
            return await stack.enter_async_context(MovingSession(opening, self._placed))
        except InvalidRequest as refused:
            rooms = Rooms(_first_round_tokens(opening))
            rooms.learn(refused)
            if not (self._is_too_large(opening, refused) and self._may_split(rooms)):
                raise
        return await self._enter_parts(stack, opening, rooms)

    @asynccontextmanager
    async def _placed(
        self, opening: Opening, lost: PlacedSession | None
    ) -> AsyncIterator[PlacedSession]:
        """At the best place that has room; `lost` is the one that it takes the place of."""
        ranked = self._ranked(opening)
        if lost:
            others = (each for each in ranked if each is not lost.backend)
            ranked = [each for each in others if each.version == lost.version]
        async with AsyncExitStack() as stack:
            yield await self._first_with_room(stack, opening, ranked)

    async def _first_with_room(
        self, stack: AsyncExitStack, opening: Opening, ranked: list[GeneratorBackend]
    ) -> PlacedSession:
        """A session at the first that can hold it: one that is too small speaks for its like."""
        rooms = Rooms(_first_round_tokens(opening))
        refusing: set[GeneratorBackend] = set()

        async def enter(backend: GeneratorBackend) -> PlacedSession:
            try:
                return await stack.enter_async_context(placed(opening, backend))
            except InvalidRequest:
                refusing.add(backend)
                raise

        while True:
            try:
                return await self._fleet.first(ranked, enter)
            except InvalidRequest as refused:
                if not self._is_too_large(opening, refused):
                    raise
                rooms.learn(refused)
                # Who was only busy is asked again: that it is, and not this, would be the answer.
                left = (each for each in ranked if each not in refusing and each.description)
                ranked = [each for each in left if rooms.of(each.description) >= opening.n]
                if not ranked:
                    raise

    def _ranked(self, opening: Opening) -> list[GeneratorBackend]:
        """In the order in which they should be asked; where none serves, one may by now."""
        members = self._fleet.members()
        if not members:
            return self._fleet.others()
        by_address = {each.target.address: each for each in members}
        needed = opening.n * _first_round_tokens(opening)
        loads = {address: _load(each, needed) for address, each in by_address.items()}
        prefix = prefix_of(opening.prompt, opening.cache_salt)
        return [by_address[address] for address in order(prefix, loads, self._draw)]

    def _known(self) -> list[GeneratorBackend]:
        """Those who might be able to do something together, here or away."""
        return [*self._fleet.members(), *self._fleet.others()]

    def _may_split(self, rooms: Rooms) -> bool:
        """Whether there are several, one of which takes a candidate."""
        known = self._known()
        return len(known) > 1 and any(
            not each.description or rooms.of(each.description) for each in known
        )

    def _is_too_large(self, opening: Opening, refused: InvalidRequest) -> bool:
        """Whether fewer candidates, and nothing else, would have been taken."""
        if refused.reason == SLOTS_EXCEEDED:
            return True
        return any(each.description and opening.n > _limit(each) for each in self._known())

    async def _enter_parts(
        self, stack: AsyncExitStack, opening: Opening, rooms: Rooms
    ) -> SplitSession:
        """Parts at several, planned anew without whoever is not there or has less room than was
        thought; nothing is held meanwhile."""
        ill: set[GeneratorBackend] = set()
        while True:
            shares = await self._shares(opening, rooms, ill)
            async with AsyncExitStack() as parts:
                session = await _entered(parts, opening, shares, rooms, ill)
                if session:
                    stack.push_async_exit(parts.pop_all())
                    return session

    async def _shares(
        self, opening: Opening, rooms: Rooms, ill: Collection[GeneratorBackend]
    ) -> dict[GeneratorBackend, int]:
        """How many candidates go where.

        Raises:
            InvalidRequest: there is not the room, and would not be with those who are away.
            Unavailable: with them there might be.
        """
        try:
            return self._sizes(opening, rooms, ill)
        except InvalidRequest:
            told = [each.description for each in self._known()]
            if all(told) and sum(map(rooms.of, told)) < opening.n:
                raise
        await self._fleet.recalled()
        try:
            return self._sizes(opening, rooms, ill)
        except InvalidRequest:
            raise Unavailable("a generator that is needed for so many candidates is away") from None

    def _sizes(
        self, opening: Opening, rooms: Rooms, ill: Collection[GeneratorBackend]
    ) -> dict[GeneratorBackend, int]:
        """Raises InvalidRequest: those who serve have not the room."""
        ranked = self._ranked(opening) if self._fleet.members() else []
        return sizes(
            opening.n, {each: rooms.of(each.description) for each in ranked if each not in ill}
        )


async def _entered(
    parts: AsyncExitStack,
    opening: Opening,
    shares: Mapping[GeneratorBackend, int],
    rooms: Rooms,
    ill: set[GeneratorBackend],
) -> SplitSession | None:
    """The parts; None if one cannot be had, for a reason that is noted.

    Admitted one after the other, by address: two requests that each hold what the other waits for
    cannot be.
    """
    sessions: list[tuple[int, PlacedSession]] = []
    first = opening.first_candidate
    for backend in sorted(shares, key=lambda each: each.target.address):
        n = shares[backend]
        part = replace(opening, n=n, first_candidate=first)
        try:
            session = await parts.enter_async_context(placed(part, backend))
        except Unavailable:
            ill.add(backend)
            return None
        except InvalidRequest as refused:
            rooms.learn(refused)
            if rooms.of(backend.description) >= n:
                raise  # it is not for its number of candidates
            return None
        sessions.append((first, session))
        first += n
    return SplitSession(sessions)


def _first_round_tokens(opening: Opening) -> int:
    return min(opening.first_round_tokens, opening.sampling.max_tokens)


def _limit(backend: GeneratorBackend) -> int:
    told: GeneratorDescription = backend.description
    return told.max_candidates


def _load(backend: GeneratorBackend, needed: int) -> float:
    """In sessions: those it has, those it was given since, and how full its slots are.

    Whoever has not the `needed` slots free comes after all who have: waiting is worse than sharing.
    """
    told: GeneratorDescription = backend.description
    sessions = told.sessions + told.waiting + backend.placed
    is_full = told.slots.capacity - told.slots.owned < needed
    return sessions + told.slots.owned / max(1, told.slots.capacity) + _FULL * is_full


def _all_of(descriptions: Sequence[GeneratorDescription]) -> GeneratorDescription:
    return replace(
        descriptions[0],
        context_tokens=min(each.context_tokens for each in descriptions),
        max_candidates=sum(each.max_candidates for each in descriptions),
        slots=together([each.slots for each in descriptions]),
        sessions=sum(each.sessions for each in descriptions),
        waiting=sum(each.waiting for each in descriptions),
    )
