"""All generators as one `Generator`: places sessions, moves lost ones, splits large ones."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from orchestrator.backends.fleet import Fleet
from orchestrator.backends.placement import prefix_of
from orchestrator.backends.sessions import (
    FailoverSession,
    GeneratorBackend,
    PlacedSession,
    placed,
)
from orchestrator.backends.split import CapacityEstimates, SplitSession, shares_of, together
from specrej.contracts import GeneratorDescription, Session, SessionSpec
from specrej.contracts.errors import InvalidRequest, SlotsExceeded, Unavailable
from specrej.remote import RemoteGenerator

# Added to the load of a generator without enough free slots: more than any number of sessions.
_FULL = 1e6


class FleetGenerator:
    """A `Generator` made of all generators of a fleet."""

    def __init__(
        self, fleet: Fleet[RemoteGenerator], draw: Callable[[], float] = random.random
    ) -> None:
        """`draw`: from [0, 1)."""
        self._fleet = fleet
        self._draw = draw

    @asynccontextmanager
    async def open(self, spec: SessionSpec) -> AsyncIterator[Session]:
        async with AsyncExitStack() as stack:
            yield await self._enter(stack, spec)

    async def describe(self) -> GeneratorDescription:
        """All generators together, as of their latest polls.

        Raises:
            SpecrejError: no generator serves.
        """
        descriptions: list[GeneratorDescription] = self._fleet.descriptions()
        return replace(
            descriptions[0],
            context_tokens=min(one.context_tokens for one in descriptions),
            max_candidates=sum(one.max_candidates for one in descriptions),
            can_fork=all(one.can_fork for one in descriptions),
            auto_candidates=max(one.auto_candidates for one in descriptions),
            auto_slots=max(one.slots.capacity for one in descriptions),
            slots=together([one.slots for one in descriptions]),
            sessions=sum(one.sessions for one in descriptions),
            waiting=sum(one.waiting for one in descriptions),
        )

    async def _enter(self, stack: AsyncExitStack, spec: SessionSpec) -> Session:
        """A session at one generator; at several if no single one could ever hold it."""
        try:
            return await stack.enter_async_context(FailoverSession(spec, self._placed))
        except InvalidRequest as refused:
            estimates = CapacityEstimates(spec.first_tokens)
            estimates.learn(refused)
            is_too_large = spec.n and self._is_too_large(spec, refused)
            if not (is_too_large and self._can_split(estimates)):
                raise
        return await self._enter_parts(stack, spec, estimates)

    @asynccontextmanager
    async def _placed(
        self, spec: SessionSpec, lost: PlacedSession | None
    ) -> AsyncIterator[PlacedSession]:
        """A session at the best generator with room; it replaces `lost`, if given."""
        ranked = self._ranked(spec)
        if lost:
            others = (backend for backend in ranked if backend is not lost.backend)
            ranked = [backend for backend in others if backend.version == lost.version]
        async with AsyncExitStack() as stack:
            yield await self._first_with_room(stack, spec, ranked)

    async def _first_with_room(
        self, stack: AsyncExitStack, spec: SessionSpec, ranked: list[GeneratorBackend]
    ) -> PlacedSession:
        """A session at the first that can hold it; skips those no larger than one that refused."""
        estimates = CapacityEstimates(spec.first_tokens)
        refusing: set[GeneratorBackend] = set()

        async def enter(backend: GeneratorBackend) -> PlacedSession:
            try:
                return await stack.enter_async_context(placed(spec, backend))
            except InvalidRequest:
                refusing.add(backend)
                raise

        while True:
            try:
                return await self._fleet.first(ranked, enter)
            except InvalidRequest as refused:
                if not self._is_too_large(spec, refused):
                    raise
                estimates.learn(refused)
                # Busy ones are tried again: their Overloaded takes precedence over a refusal.
                left = [b for b in ranked if b not in refusing and b.description]
                ranked = [b for b in left if estimates.of(b.description) >= spec.n]
                if not ranked:
                    raise

    def _ranked(self, spec: SessionSpec) -> list[GeneratorBackend]:
        prefix = prefix_of(spec.prompt, spec.cache_salt)
        return self._fleet.ranked(prefix, lambda backend: _load(backend, spec), self._draw)

    def _all(self) -> list[GeneratorBackend]:
        return [*self._fleet.members(), *self._fleet.others()]

    def _can_split(self, estimates: CapacityEstimates) -> bool:
        """Whether there are several generators, and one could hold a candidate."""
        known = self._all()
        return len(known) > 1 and any(
            not backend.description or estimates.of(backend.description) for backend in known
        )

    def _is_too_large(self, spec: SessionSpec, refused: InvalidRequest) -> bool:
        """Whether a generator would have accepted fewer candidates."""
        if isinstance(refused, SlotsExceeded):
            return True
        descriptions: list[GeneratorDescription] = [b.description for b in self._all()]
        return any(known and spec.n > known.max_candidates for known in descriptions)

    async def _enter_parts(
        self, stack: AsyncExitStack, spec: SessionSpec, estimates: CapacityEstimates
    ) -> SplitSession:
        """Parts at several generators. After a failure all parts are closed and planned anew,
        without generators that are away and with smaller estimates of those that refused."""
        away: set[GeneratorBackend] = set()
        while True:
            shares = await self._shares(spec, estimates, away)
            async with AsyncExitStack() as parts:
                if session := await _entered(parts, spec, shares, estimates, away):
                    stack.push_async_exit(parts.pop_all())
                    return session

    async def _shares(
        self, spec: SessionSpec, estimates: CapacityEstimates, away: Collection[GeneratorBackend]
    ) -> dict[GeneratorBackend, int]:
        """Number of candidates by generator.

        Raises:
            SlotsExceeded: all generators together, also those away, are too small.
            Unavailable: a generator that is needed is away.
        """
        for is_last in (False, True):
            ranked = self._ranked(spec) if self._fleet.members() else []
            room = {b: estimates.of(b.description) for b in ranked if b not in away}
            try:
                return shares_of(spec.n, room)
            except SlotsExceeded:
                descriptions = [backend.description for backend in self._all()]
                if all(descriptions) and sum(map(estimates.of, descriptions)) < spec.n:
                    raise
            if not is_last:
                await self._fleet.poll_not_serving()
        raise Unavailable("a generator that is needed for so many candidates is away")


async def _entered(
    parts: AsyncExitStack,
    spec: SessionSpec,
    shares: Mapping[GeneratorBackend, int],
    estimates: CapacityEstimates,
    away: set[GeneratorBackend],
) -> SplitSession | None:
    """The parts; None if one could not be opened: then `away` or `estimates` have changed.

    Opened one after the other, by address, so that two such requests cannot each hold what the
    other waits for.
    """
    sessions: list[tuple[int, PlacedSession]] = []
    first = spec.first_candidate_id
    for backend in sorted(shares, key=lambda backend: backend.target.address):
        n = shares[backend]
        least = min(n, spec.min_answers)
        part = replace(spec, n=n, first_candidate_id=first, min_answers=least)
        try:
            session = await parts.enter_async_context(placed(part, backend))
        except Unavailable:
            away.add(backend)
            return None
        except InvalidRequest as refused:
            estimates.learn(refused)
            if estimates.of(backend.description) >= n:
                raise  # not because of the number of candidates
            return None
        sessions.append((first, session))
        first += n
    return SplitSession(sessions)


def _load(backend: GeneratorBackend, spec: SessionSpec) -> float:
    """In sessions: those it has, those placed since its description, and the share of full slots.

    Generators without the needed free slots come last: waiting is worse than sharing, and so are
    fewer candidates where their number is left open.
    """
    known: GeneratorDescription = backend.description
    sessions = known.sessions + known.waiting + backend.placed
    needed = spec.n * spec.first_tokens
    if not spec.n:
        most = max(1, spec.min_answers, known.auto_candidates)
        needed = min(most * spec.first_tokens, known.slots.capacity // 2)
    is_full = known.slots.capacity - known.slots.owned < needed
    return sessions + known.slots.owned / max(1, known.slots.capacity) + _FULL * is_full
