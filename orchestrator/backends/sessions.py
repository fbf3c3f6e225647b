"""A session at one generator, and one that moves to another generator when its own is lost.

What a candidate says depends on its id and the seed alone. So the candidates of a lost session are
grown again elsewhere, those that still lived and no others, and say what they said before: exactly
in float32; in bfloat16, where the shape of a batch may round differently, nearly always.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

from orchestrator.backends.fleet import Backend
from orchestrator.remote import RemoteGenerator
from specrej.contracts import (
    Candidate,
    Generator,
    Prompt,
    Pruned,
    Round,
    Sampling,
    Session,
    SlotGauge,
)
from specrej.errors import InvalidRequest, Overloaded, Unavailable
from specrej.telemetry import metrics, names

log = logging.getLogger(__name__)

GeneratorBackend = Backend[RemoteGenerator]

_NO_ROOM = "a generator was lost, and no other has the room"


@dataclass(frozen=True, slots=True)
class Opening:
    """All that a session is opened with; as `Generator.open`."""

    prompt: Prompt
    n: int
    sampling: Sampling
    first_round_tokens: int
    cache_salt: str = ""
    first_candidate: int = 0

    def at(self, generator: Generator) -> AbstractAsyncContextManager[Session]:
        return generator.open(
            self.prompt,
            self.n,
            self.sampling,
            self.first_round_tokens,
            self.cache_salt,
            self.first_candidate,
        )


class PlacedSession:
    """A `Session` at a backend; Unavailable as soon as that is silent for too long."""

    def __init__(self, session: Session, backend: GeneratorBackend) -> None:
        self._session = session
        self.backend = backend
        self.version = backend.version  # as of now: whoever comes back may be another one
        self.n = session.n
        self.prompt_tokens = session.prompt_tokens

    async def extend(self, until_tokens: int) -> Round:
        async with self.backend.answering():
            return await self._session.extend(until_tokens)

    async def prune(self, keep: Collection[int]) -> Pruned:
        async with self.backend.answering():
            return await self._session.prune(keep)


@asynccontextmanager
async def placed(opening: Opening, backend: GeneratorBackend) -> AsyncIterator[PlacedSession]:
    """A session there."""
    async with backend.holding(opening.at(backend.peer)) as session:
        yield PlacedSession(session, backend)


Place = Callable[[Opening, PlacedSession | None], AbstractAsyncContextManager[PlacedSession]]


class MovingSession:
    """A `Session` that survives the loss of one generator."""

    def __init__(self, opening: Opening, place: Place) -> None:
        """`place`: a session at the best backend, to take the place of the one that is named."""
        self._opening = opening
        self._place = place
        self._stack = AsyncExitStack()
        self._lost: PlacedSession | None = None  # until it has moved
        self._may_move = True
        self._num_tokens = 0  # of every live candidate
        # Set on entering.
        self.n: int
        self.prompt_tokens: int
        self._session: PlacedSession
        self._live: set[int]
        self._slots: SlotGauge

    async def __aenter__(self) -> Self:
        session = await self._stack.enter_async_context(self._place(self._opening, None))
        self._session, self.n, self.prompt_tokens = session, session.n, session.prompt_tokens
        first = self._opening.first_candidate
        self._live = set(range(first, first + self.n))
        self._slots = SlotGauge(0, 0, 0)
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        return await self._stack.__aexit__(*error)  # type: ignore[arg-type]

    async def extend(self, until_tokens: int) -> Round:
        if not self._lost:
            try:
                return self._noted(await self._session.extend(until_tokens))
            except Unavailable as error:
                await self._leave(error)
        return self._noted(await self._move(until_tokens))

    async def prune(self, keep: Collection[int]) -> Pruned:
        self._live &= set(keep)
        if not self._lost:
            try:
                return await self._session.prune(keep)
            except Unavailable as error:
                await self._leave(error)
        return Pruned(0, self._slots)

    def _noted(self, ended: Round) -> Round:
        self._live -= {each.id for each in ended.candidates if each.finish}
        self._num_tokens = ended.num_tokens
        self._slots = replace(ended.slots, session=0)
        return ended

    async def _leave(self, error: Unavailable) -> None:
        """Give up what is there, without a goodbye.

        Raises:
            Unavailable: for the second time.
        """
        if not self._may_move:
            raise error
        self._may_move = False
        self._lost = self._session
        await self._stack.__aexit__(type(error), error, error.__traceback__)

    async def _move(self, until_tokens: int) -> Round:
        """The live candidates at another generator, grown again to where they were, and on."""
        before, lost = self._num_tokens, self._lost
        log.warning("a generator was lost: %d candidates begin again", len(self._live))
        result = "failed"
        try:
            try:
                moving = self._place(self._again(), lost)
                self._session = await self._stack.enter_async_context(moving)
            except (InvalidRequest, Overloaded) as error:
                # What one has taken is no bad request, and no too many, because it was lost.
                raise Unavailable(_NO_ROOM) from error
            await self._session.prune(self._live)
            ended = await self._session.extend(until_tokens)
            if ended.num_tokens < before and any(not each.finish for each in ended.candidates):
                raise Unavailable(_NO_ROOM)
            result = "moved"
        finally:
            metrics.add(names.SESSIONS_MOVED, result=result)
        self._lost = None
        return _continued(ended, before)

    def _again(self) -> Opening:
        """Room for those that live: ids between the first and the last, none below its place."""
        first, last = min(self._live), max(self._live)
        n = last - first + 1
        # Admitted for n, then cut to those that live: together they must reach one more token.
        needed = len(self._live) * (self._num_tokens + 1)
        most = self._opening.sampling.max_tokens
        tokens = min(most, max(self._opening.first_round_tokens, -(-needed // n) + 1))
        return replace(self._opening, n=n, first_candidate=first, first_round_tokens=tokens)


def _continued(ended: Round, before: int) -> Round:
    """A round of candidates that began again, with what is new since they had `before` tokens."""
    repeated = sum(min(before, each.num_tokens) for each in ended.candidates)
    candidates = tuple(_since(each, before) for each in ended.candidates)
    return replace(ended, candidates=candidates, repeated_tokens=repeated)


def _since(candidate: Candidate, before: int) -> Candidate:
    return replace(
        candidate,
        new_token_ids=candidate.new_token_ids[before:],
        new_logprobs=candidate.new_logprobs[before:],
    )
