"""Prompts to commands, prefixes to candidates: for the own engine's generator and for vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from generator_service.engine.commands import (
    OpenCommand,
    Prefix,
    PrefixBatch,
    named_tokens,
)
from generator_service.engine.grammar import Grammars
from generator_service.engine.steps import Load
from generator_service.engine.text import Text
from specrej.contracts import (
    Candidate,
    GeneratorDescription,
    Round,
    Sampling,
    SessionSpec,
)
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.threads import WorkClock

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Frontend:
    """A model's text and limits; tokenizer work is done off the event loop.

    `card` has no sessions: `description` adds those of a moment.
    """

    text: Text
    card: GeneratorDescription
    _clock: WorkClock = field(default_factory=WorkClock)
    _grammars: Grammars = field(init=False)

    def __post_init__(self) -> None:
        self._grammars = self.text.grammars(self.card.vocabulary)

    def heartbeat_s(self) -> float:
        """Seconds since the oldest running tokenizer call began; 0 if none runs."""
        return self._clock.oldest_s()

    def description(self, load: Load) -> GeneratorDescription:
        """The card with slots and sessions as in `load`."""
        return replace(
            self.card,
            slots=load.slots,
            sessions=load.sessions,
            waiting=load.waiting,
            can_fork=True,
        )

    async def command(self, spec: SessionSpec) -> OpenCommand:
        """A session's spec in tokens.

        Raises:
            InvalidRequest: the prompt has no tokens, or exceeds the context with max_tokens; the
                structured output is not supported.
        """
        text, words = self.text, spec.sampling.bad_words
        output = spec.sampling.structured_output
        prompt_ids, bad_words = await self._in_thread(
            lambda: (text.encode(spec.prompt), text.sequences(words))
        )
        self._check_context(len(prompt_ids), spec.sampling.max_tokens)
        return OpenCommand(
            prompt_ids,
            spec.n,
            spec.sampling,
            spec.first_round_tokens,
            text.stop_texts(spec.sampling.stop),
            spec.cache_salt,
            spec.adapter,
            bad_words,
            await self._grammars.compiled(output, spec.cache_salt) if output else None,
        )

    async def round(self, batch: PrefixBatch, sampling: Sampling) -> Round:
        def ended() -> Round:
            candidates = tuple(self._candidate(prefix, sampling) for prefix in batch.prefixes)
            tokens = named_tokens(candidates, self.text.token) if sampling.logprobs else ()
            slots = batch.slots
            return Round(candidates, batch.ended_by, batch.num_tokens, slots, token_texts=tokens)

        return await self._in_thread(ended)

    async def _in_thread(self, do: Callable[[], T]) -> T:
        def timed() -> T:
            with self._clock.working():
                return do()

        return await asyncio.to_thread(timed)

    def _candidate(self, prefix: Prefix, sampling: Sampling) -> Candidate:
        ids = prefix.token_ids
        written = ids[:-1] if ids and ids[-1] in sampling.stop_token_ids else ids
        text = self.text.answer(written, sampling.stop, sampling.min_tokens)
        return prefix.candidate(text, logprobs=sampling.logprobs)

    def _check_context(self, prompt_tokens: int, max_tokens: int) -> None:
        limit = self.card.context_tokens
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
