"""All generators as one `Generator`: places sessions, moves what is lost, splits what is large.

Knows no scores. Who gets what is `placement.py`, who is there `fleet.py`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from orchestrator.backends.fleet import Fleet
from orchestrator.backends.placement import order, prefix_of
from orchestrator.backends.sessions import (
    GeneratorBackend,
    MovingSession,
    Opening,
    PlacedSession,
    placed,
)
from orchestrator.backends.split import SplitSession, may_split, room_of, sizes, together
from orchestrator.remote import RemoteGenerator
from specrej.contracts import GeneratorDescription, Prompt, Sampling, Session
from specrej.errors import InvalidRequest, Unavailable


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
        refused: InvalidRequest
        try:
            return await stack.enter_async_context(MovingSession(opening, self._placed))
        except InvalidRequest as error:
            if not self._could_split(opening, error):
                self._check_all_are_here(opening, error)
                raise
            refused = error
        try:
            return await self._enter_parts(stack, opening, refused)
        except InvalidRequest as error:
            # Refused first for a generator's limit of candidates, then for the slots of these.
            if error.reason == refused.reason or not self._could_split(opening, error):
                raise
            refused = error
        return await self._enter_parts(stack, opening, refused)

    @asynccontextmanager
    async def _placed(
        self, opening: Opening, without: GeneratorBackend | None
    ) -> AsyncIterator[PlacedSession]:
        """At the best place that has room; `without` the one that it takes the place of."""
        ranked = self._ranked(opening)
        if without:
            version = self._fleet.version_of(without)
            others = (each for each in ranked if each is not without)
            ranked = [each for each in others if self._fleet.version_of(each) == version]
        async with AsyncExitStack() as stack:
            yield await self._fleet.first(
                ranked, lambda each: stack.enter_async_context(placed(opening, each))
            )

    def _ranked(self, opening: Opening) -> list[GeneratorBackend]:
        """In the order in which they should be asked; where none serves, one may by now."""
        members = self._fleet.members()
        if not members:
            return self._fleet.others()
        by_address = {each.target.address: each for each in members}
        loads = {address: _load(each) for address, each in by_address.items()}
        prefix = prefix_of(opening.prompt, opening.cache_salt)
        return [by_address[address] for address in order(prefix, loads, self._draw)]

    def _could_split(self, opening: Opening, refused: InvalidRequest) -> bool:
        members = self._fleet.members()
        return len(members) > 1 and may_split(opening, refused, members[0].description)

    def _check_all_are_here(self, opening: Opening, refused: InvalidRequest) -> None:
        """Raises Unavailable: with those that are away there might be the room, and soon."""
        members = self._fleet.members()
        if members and self._fleet.others() and may_split(opening, refused, members[0].description):
            raise Unavailable("a generator that is needed for so many candidates is away")

    async def _enter_parts(
        self, stack: AsyncExitStack, opening: Opening, refused: InvalidRequest
    ) -> SplitSession:
        """Parts are admitted one after the other, by address: two requests that each hold what the
        other waits for cannot be."""
        members = {each.target.address: each for each in self._ranked(opening)}
        room = partial(
            room_of,
            refused=refused,
            refused_by=next(iter(members.values())).description,
            first_round_tokens=opening.first_round_tokens,
        )
        shares = sizes(opening.n, {at: room(each.description) for at, each in members.items()})
        sessions: list[tuple[int, PlacedSession]] = []
        first = opening.first_candidate
        for address in sorted(shares):
            part = replace(opening, n=shares[address], first_candidate=first)
            session = await stack.enter_async_context(placed(part, members[address]))
            sessions.append((first, session))
            first += shares[address]
        return SplitSession(sessions)


def _load(backend: GeneratorBackend) -> float:
    """In sessions: those that wait, those it was given since, and how full its slots are."""
    told: GeneratorDescription = backend.description
    return told.waiting + backend.placed + told.slots.owned / max(1, told.slots.capacity)


def _all_of(descriptions: Sequence[GeneratorDescription]) -> GeneratorDescription:
    return replace(
        descriptions[0],
        context_tokens=min(each.context_tokens for each in descriptions),
        max_candidates=sum(each.max_candidates for each in descriptions),
        slots=together([each.slots for each in descriptions]),
        sessions=sum(each.sessions for each in descriptions),
        waiting=sum(each.waiting for each in descriptions),
    )
