"""All generators as one `Generator`: a session is placed at the best one with room for it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from operator import attrgetter

from orchestrator.backends.fleet import Backend, Fleet
from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest, Unavailable
from specrej.contracts.status import is_answer
from specrej.remote import RemoteGenerator

_Backend = Backend[RemoteGenerator]

# Added to the load of a generator without enough free slots: more than any number of sessions.
_FULL = 1e6
_GAUGES = attrgetter(*c.SlotGauge.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class FleetGenerator:
    """A `Generator` made of all generators of a fleet."""

    _fleet: Fleet[RemoteGenerator]
    _draw: Callable[[], float] = random.random  # from [0, 1)

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[c.Session]:
        """A session at the best generator that takes it, of the fingerprint `spec.like` if there
        is one; its calls raise GeneratorLost when that generator is lost."""
        ranked = self._fleet.ranked(lambda backend: _load(backend, spec), self._draw)
        if spec.like:
            ranked = sorted(ranked, key=lambda backend: backend.version != spec.like)
        async with AsyncExitStack() as stack:

            async def enter(backend: _Backend) -> PlacedSession:
                opening = backend.holding(backend.peer.open(spec))
                return PlacedSession(await stack.enter_async_context(opening), backend)

            yield await self._fleet.first(ranked, enter)

    async def check(self, spec: c.SessionSpec) -> None:
        """As one of the generators does; its refusal is that of all."""
        ranked = self._fleet.ranked(lambda backend: _load(backend, spec), self._draw)

        async def enter(backend: _Backend) -> InvalidRequest | None:
            try:
                async with backend.answering():
                    await backend.peer.check(spec)
            except InvalidRequest as refusal:
                return refusal
            return None

        if refusal := await self._fleet.first(ranked, enter):
            raise refusal

    async def describe(self) -> c.GeneratorDescription:
        """All generators together, as of their latest reports.

        Raises:
            SpecrejError: no generator serves.
        """
        return self._fleet.combined(together)


def together(descriptions: Sequence[c.GeneratorDescription]) -> c.GeneratorDescription:
    """Generators as one: the first, with limits that suit all. A request has room for as many
    candidates as the largest holds; one that names a model goes to its generators."""
    gauges = [_GAUGES(one.slots) for one in descriptions]
    models = dict.fromkeys(one.model for one in descriptions)
    return replace(
        descriptions[0],
        adapters=tuple(models) if len(models) > 1 else (),
        context_tokens=min(one.context_tokens for one in descriptions),
        vocabulary=min(one.vocabulary for one in descriptions),
        max_candidates=max(one.max_candidates for one in descriptions),
        can_fork=all(one.can_fork for one in descriptions),
        ignores_seeds=any(one.ignores_seeds for one in descriptions),
        auto_candidates=max(one.auto_candidates for one in descriptions),
        session_slots=max(one.slots.capacity for one in descriptions),
        slots=c.SlotGauge(*(sum(values) for values in zip(*gauges, strict=True))),
        sessions=sum(one.sessions for one in descriptions),
        waiting=sum(one.waiting for one in descriptions),
        tool_format=descriptions[0].tool_format if all(o.tool_format for o in descriptions) else "",
        takes_images=all(one.takes_images for one in descriptions),
        max_prompt_bytes=min((b for one in descriptions if (b := one.max_prompt_bytes)), default=0),
    )


class PlacedSession:
    """A `Session` at a backend; its calls raise GeneratorLost when the backend is lost."""

    def __init__(self, session: c.Session, backend: _Backend) -> None:
        self._session = session
        self._backend = backend
        self.n = session.n
        self.prompt_tokens = session.prompt_tokens
        self.max_tokens = session.max_tokens
        self.reduced = session.reduced
        self.fingerprint = session.fingerprint
        self.costly_rounds = session.costly_rounds
        self.answer_form = session.answer_form

    async def extend(self, until_tokens: int, report: c.Report | None = None) -> c.Round:
        async with self._answering():
            return await self._session.extend(until_tokens, report)

    async def prune(self, keep: Collection[int], forks: c.Forks = c.NO_FORKS) -> c.Pruned:
        async with self._answering():
            return await self._session.prune(keep, forks)

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Raise GeneratorLost for Unavailable, and place no session there until the next report.

        Not where a generator of whole answers reports that its endpoint failed: it has retried
        already, and another generator would pay for all answers again.
        """
        try:
            async with self._backend.answering():
                yield
        except Unavailable as error:
            described = self._backend.description
            if described and described.whole_answers and is_answer(error):
                raise
            self._backend.suspect(error)
            raise c.GeneratorLost(error.message) from error


def _load(backend: _Backend, spec: c.SessionSpec) -> float:
    """In sessions: those it has, those placed since its description, and the share of full slots.

    Generators without the needed free slots come last: waiting is worse than sharing, and so are
    fewer candidates where their number is left open.
    """
    known: c.GeneratorDescription = backend.description
    sessions = known.sessions + known.waiting + backend.placed
    needed = spec.n * spec.first_tokens
    if not spec.n:
        most = max(1, known.auto_candidates)
        needed = min(most * spec.first_tokens, known.slots.capacity // 2)
    is_full = known.slots.capacity - known.slots.owned < needed
    return sessions + known.slots.owned / max(1, known.slots.capacity) + _FULL * is_full
