"""A `Generator` on the own engine, in this process. Independent of the transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from generator_service.engine.frontend import Frontend
from generator_service.engine.steps import Load
from generator_service.engine.text import Text
from generator_service.engine.thread import EngineThread
from specrej.contracts import (
    NO_FORKS,
    Forks,
    GeneratorDescription,
    Pruned,
    Round,
    Sampling,
    SessionSpec,
)


@dataclass(frozen=True, slots=True)
class LocalSession:
    """A `Session` on an engine of this process."""

    _engine: EngineThread
    _frontend: Frontend
    _id: int
    _sampling: Sampling
    n: int
    prompt_tokens: int
    reduced: bool
    fingerprint: str = ""  # the servicer has the generator's

    async def extend(self, until_tokens: int) -> Round:
        batch = await asyncio.wrap_future(self._engine.extend(self._id, until_tokens))
        return await self._frontend.round(batch, self._sampling)

    async def prune(self, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        return await asyncio.wrap_future(self._engine.prune(self._id, keep, forks))


class LocalGenerator:
    """A `Generator` on an engine of this process."""

    def __init__(self, engine: EngineThread, text: Text, card: GeneratorDescription) -> None:
        self._engine = engine
        self._frontend = Frontend(text, card)

    @asynccontextmanager
    async def open(self, spec: SessionSpec) -> AsyncIterator[LocalSession]:
        command = await self._frontend.command(spec)
        session_id, opened = self._engine.open(command)
        try:
            admitted = await asyncio.wrap_future(opened)
            yield LocalSession(
                self._engine,
                self._frontend,
                session_id,
                spec.sampling,
                admitted.n,
                len(command.prompt_ids),
                admitted.reduced,
            )
        finally:
            await asyncio.wrap_future(self._engine.close(session_id))

    async def describe(self) -> GeneratorDescription:
        return self._frontend.description(self.load())

    def load(self) -> Load:
        """Slots and sessions as of now; from any thread."""
        engine = self._engine.engine
        return Load(engine.gauge(), len(engine.sessions), len(engine.queue))

    def heartbeat_s(self) -> float:
        """The older of the engine thread's heartbeat and the frontend's."""
        return max(self._engine.heartbeat_s(), self._frontend.heartbeat_s())

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.stop()
