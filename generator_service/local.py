"""The engine as a `Generator`: prompts in, prefix batches with text out, all in this process.

Validates against the model's limits, keeps tokenizer work off the event loop, and frees a
session's slots when its context is left, however that happens. Knows no wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from generator_service.engine import Engine, OpenCommand, Prefix, PrefixBatch
from generator_service.steps import Load
from generator_service.text import Text
from specrej.contracts import (
    Candidate,
    GeneratorDescription,
    Prompt,
    Pruned,
    Round,
    Sampling,
)
from specrej.errors import InvalidRequest, Violation


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a generator says of its model."""

    name: str
    fingerprint: str
    context_tokens: int
    max_candidates: int
    vocabulary: int
    slot_bytes: int
    device: str

    def description(self, load: Load) -> GeneratorDescription:
        """With what there is to do now."""
        return GeneratorDescription(
            model=self.name,
            fingerprint=self.fingerprint,
            context_tokens=self.context_tokens,
            max_candidates=self.max_candidates,
            vocabulary=self.vocabulary,
            slot_bytes=self.slot_bytes,
            device=self.device,
            slots=load.slots,
            sessions=load.sessions,
            waiting=load.waiting,
        )

    def check_context(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raises InvalidRequest: there are no prompt tokens, or both are more than the context."""
        limit = self.context_tokens
        if not prompt_tokens:
            raise InvalidRequest([Violation("prompt", "has no tokens")])
        if prompt_tokens + max_tokens > limit:
            tokens = f"{prompt_tokens} prompt + {max_tokens} new tokens"
            description = f"{tokens} exceed the context of {limit}"
            raise InvalidRequest(
                [Violation("sampling.max_tokens", description)],
                reason="CONTEXT_EXCEEDED",
                metadata={
                    "prompt_tokens": str(prompt_tokens),
                    "max_tokens": str(max_tokens),
                    "context_tokens": str(limit),
                },
            )


class LocalSession:
    """A `Session` on an engine of this process."""

    def __init__(
        self,
        engine: Engine,
        text: Text,
        session_id: int,
        n: int,
        prompt_tokens: int,
        sampling: Sampling,
    ) -> None:
        self._engine = engine
        self._text = text
        self._id = session_id
        self._sampling = sampling
        self.n = n
        self.prompt_tokens = prompt_tokens

    async def extend(self, until_tokens: int) -> Round:
        batch = await asyncio.wrap_future(self._engine.extend(self._id, until_tokens))
        return await asyncio.to_thread(self._round, batch)

    async def prune(self, keep: Collection[int]) -> Pruned:
        return await asyncio.wrap_future(self._engine.prune(self._id, keep))

    def _round(self, batch: PrefixBatch) -> Round:
        candidates = tuple(self._candidate(prefix) for prefix in batch.prefixes)
        return Round(candidates, batch.ended_by, batch.num_tokens, batch.slots)

    def _candidate(self, prefix: Prefix) -> Candidate:
        return Candidate(
            id=prefix.id,
            text=self._text.answer(
                prefix.token_ids, self._sampling.stop, self._sampling.min_tokens
            ),
            num_tokens=len(prefix.token_ids),
            logprob=prefix.logprob,
            finish=prefix.finish,
            new_token_ids=prefix.token_ids[len(prefix.token_ids) - prefix.num_new :],
            new_logprobs=prefix.new_logprobs if self._sampling.logprobs else (),
        )


class LocalGenerator:
    """A `Generator` on an engine of this process."""

    def __init__(self, engine: Engine, text: Text, card: ModelCard) -> None:
        self._engine = engine
        self._text = text
        self._card = card

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AsyncIterator[LocalSession]:
        prompt_ids = await asyncio.to_thread(self._text.encode, prompt)
        self._card.check_context(len(prompt_ids), sampling.max_tokens)
        command = OpenCommand(
            prompt_ids,
            n,
            sampling,
            first_round_tokens,
            self._text.stops(sampling.stop),
            cache_salt,
            first_candidate,
        )
        session_id, opened = self._engine.open(command)
        try:
            n = (await asyncio.wrap_future(opened)).n
            yield LocalSession(self._engine, self._text, session_id, n, len(prompt_ids), sampling)
        finally:
            await asyncio.wrap_future(self._engine.close(session_id))

    def load(self) -> Load:
        """Slots and sessions as of now; from any thread."""
        engine = self._engine
        return Load(engine.gauge(), engine.num_sessions, engine.num_waiting)

    def heartbeat_s(self) -> float:
        """As `Engine.heartbeat_s`."""
        return self._engine.heartbeat_s()

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.stop()

    async def describe(self) -> GeneratorDescription:
        return self._card.description(self.load())
