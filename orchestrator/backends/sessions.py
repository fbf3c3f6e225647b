"""A session at one generator, and one that moves to another generator when its own is lost.

The live candidates of a lost session continue at another generator, which reads their tokens and
does not draw them again: texts drawn again could differ, because rounding depends on the batch.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Self

from orchestrator.backends.fleet import Backend
from specrej.contracts import (
    NO_FORKS,
    Forks,
    Pruned,
    Round,
    RoundEnd,
    Session,
    SessionSpec,
    SlotGauge,
    StartedCandidate,
)
from specrej.contracts.errors import InternalError, InvalidRequest, Overloaded, Unavailable
from specrej.contracts.status import is_answer
from specrej.remote import RemoteGenerator
from specrej.telemetry import metrics, names

log = logging.getLogger(__name__)

GeneratorBackend = Backend[RemoteGenerator]

_NO_ROOM = "a generator was lost, and no other has the room"
_LOST_AGAIN = "a generator was lost, and so was the one in its place"


class PlacedSession:
    """A `Session` at a backend; its calls raise Unavailable when the backend is lost."""

    def __init__(self, session: Session, backend: GeneratorBackend) -> None:
        self._session = session
        self.backend = backend
        self.version = backend.version  # a restarted backend may have another
        self.n = session.n
        self.prompt_tokens = session.prompt_tokens
        self.reduced = session.reduced

    async def extend(self, until_tokens: int) -> Round:
        async with self.backend.answering():
            return await self._session.extend(until_tokens)

    async def prune(self, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        async with self.backend.answering():
            return await self._session.prune(keep, forks)


@asynccontextmanager
async def placed(spec: SessionSpec, backend: GeneratorBackend) -> AsyncIterator[PlacedSession]:
    async with backend.holding(backend.peer.open(spec)) as session:
        yield PlacedSession(session, backend)


Place = Callable[[SessionSpec, PlacedSession | None], AbstractAsyncContextManager[PlacedSession]]


class FailoverSession:
    """A `Session` that survives the loss of one generator; only one, because a prompt that crashes
    its generator must not be sent to all of them."""

    def __init__(self, spec: SessionSpec, place: Place) -> None:
        """`place` opens a session at the best backend, instead of a lost one if given."""
        self._spec = spec
        self._place = place
        self._stack = AsyncExitStack()
        self._lost: PlacedSession | None = None  # until it has moved
        self._may_move = True
        self._num_tokens = 0  # of every live candidate
        self._repeated = 0  # tokens that a move during a prune computed again
        self._live: dict[int, StartedCandidate]  # with their tokens so far
        # Set on entering.
        self.n: int
        self.prompt_tokens: int
        self.reduced: bool
        self._session: PlacedSession
        self._slots: SlotGauge

    async def __aenter__(self) -> Self:
        session = await self._stack.enter_async_context(self._place(self._spec, None))
        self._session, self.n, self.prompt_tokens = session, session.n, session.prompt_tokens
        self.reduced = session.reduced
        first = self._spec.first_candidate_id
        ids = range(first, first + self.n)
        started = self._spec.started or [StartedCandidate(i, (), 0.0) for i in ids]
        self._live = {candidate.id: candidate for candidate in started}
        self._num_tokens = len(started[0].token_ids)
        self._slots = SlotGauge(0, 0, 0)
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        return await self._stack.__aexit__(*error)  # type: ignore[arg-type]

    async def extend(self, until_tokens: int) -> Round:
        if not self._live:  # a session that moved without candidates would begin others
            return Round((), RoundEnd.ALL_FINISHED, self._num_tokens, self._slots)
        if not self._lost:
            try:
                return self._noted(await self._session.extend(until_tokens))
            except Unavailable as error:
                await self._leave(error)
        return self._noted(await self._move(until_tokens))

    async def prune(self, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        """As `Session.prune`; the forks of a lost session are made where it moves to."""
        live, self._live = self._live, {i: self._live[i] for i in keep if i in self._live}
        pruned = Pruned(0, self._slots, tuple(sorted(forks)))
        if not self._lost:
            try:
                pruned = await self._session.prune(keep, forks)
            except Unavailable as error:
                await self._leave(error)
        if self._lost and self._live and forks:
            # To the current position: the other generator reads the tokens and draws none.
            moved = self._noted(await self._move(self._num_tokens))
            self._repeated = moved.repeated_tokens
            pruned = replace(await self._session.prune(keep, forks), freed_slots=0)
        for number in forks.keys() - {*pruned.refused}:
            self._live[number] = replace(live[forks[number]], id=number)
        return pruned

    def _noted(self, ended: Round) -> Round:
        for c in ended.candidates:
            if c.id not in self._live:
                raise InternalError(f"a generator sent candidate {c.id}, which is not live")
            started = self._live.pop(c.id)
            if not c.finish:
                tokens = started.token_ids + c.new_token_ids
                self._live[c.id] = StartedCandidate(c.id, tokens, c.logprob)
        self._num_tokens = ended.num_tokens
        self._slots = replace(ended.slots, session=0)
        repeated, self._repeated = self._repeated, 0
        return replace(ended, repeated_tokens=ended.repeated_tokens + repeated)

    async def _leave(self, error: Unavailable) -> None:
        """Close the lost session, without a final exchange.

        Raises:
            Unavailable: the session has moved before, or a generator of whole answers reported the
                error: it has retried already, and another one would generate all of them again.
        """
        described = self._session.backend.description
        is_paid = described and described.whole_answers and is_answer(error)
        if is_paid or not self._may_move:
            raise error
        self._lost = self._session
        await self._stack.__aexit__(type(error), error, error.__traceback__)

    async def _move(self, until_tokens: int) -> Round:
        """Go on with the live candidates at another generator, to `until_tokens`; once.

        Raises:
            Unavailable: no other generator takes them, or it is lost, too.
        """
        if not self._may_move:
            raise Unavailable(_LOST_AGAIN)
        self._may_move = False
        before, lost = self._num_tokens, self._lost
        log.warning("a generator was lost: moving %d candidates", len(self._live))
        result = "failed"
        try:
            try:
                moving = self._place(self._rest(), lost)
                self._session = await self._stack.enter_async_context(moving)
            except (InvalidRequest, Overloaded) as error:
                # The request was accepted before: the caller must not get this refusal.
                raise Unavailable(_NO_ROOM) from error
            ended = await self._session.extend(until_tokens)
            if ended.num_tokens < before and any(not c.finish for c in ended.candidates):
                raise Unavailable(_NO_ROOM)
            result = "moved"
        finally:
            metrics.add(names.SESSIONS_MOVED, result=result)
        self._lost = None
        return replace(ended, repeated_tokens=before * len(ended.candidates))

    def _rest(self) -> SessionSpec:
        """The spec of the rest of the session, with room for a further token of each candidate."""
        live = tuple(self._live[i] for i in sorted(self._live))
        tokens = max(self._spec.first_round_tokens, self._num_tokens + 1)
        return replace(self._spec, n=len(live), started=live, first_round_tokens=tokens)
