"""A `Generator` on the own engine, in this process; its frontend is vLLM's, too.

The frontend converts prompts to commands and prefixes to candidates. Independent of the transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from generator_service.engine.answer_grammar import constrained
from generator_service.engine.commands import Load, OpenCommand, Opened, PrefixBatch, named_tokens
from generator_service.engine.grammar import path_of, refusal
from generator_service.engine.text import Text
from generator_service.engine.thread import EngineThread
from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.contracts.validation import check_prompt_bytes, refuse_images
from specrej.threads import WorkClock

T = TypeVar("T")

_LONG_CHARACTERS = 50_000


class ReadImages(Protocol):
    """Converts a prompt's images for the program that computes."""

    async def __call__(
        self, prompt_ids: Sequence[int], images: Mapping[str, c.Image], cache_salt: str
    ) -> tuple[Sequence[int], Any]:
        """The prompt's tokens with those of its images, and `OpenCommand.images`. No tokens: the
        program is a server that is sent messages, and counts them.

        Raises:
            InvalidRequest: the model cannot read them; `images` has their paths in errors.
        """


class Frontend:
    """A model's text and limits; tokenizer work is done off the event loop."""

    def __init__(
        self,
        text: Text,
        card: c.GeneratorDescription,
        read_images: ReadImages | None = None,
        *,
        has_grammars: bool = True,
    ) -> None:
        """`card` has no sessions: `description` adds those of a moment. Without `read_images`,
        prompts with images are refused.
        `has_grammars`: whether the program that computes has those of llguidance."""
        self._read_images = read_images
        self._text = text
        most = card.context_tokens * text.longest_token()
        self._card = replace(card, max_prompt_bytes=most, tool_format=text.tool_format)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by tenant
        self._clock = WorkClock()
        self._grammars = text.grammars(card.vocabulary)
        self._has_grammars = has_grammars and self._grammars.is_supported

    def heartbeat_s(self) -> float:
        """Seconds since the oldest running tokenizer call began; 0 if none runs."""
        return self._clock.oldest_s()

    def description(self, load: Load) -> c.GeneratorDescription:
        """The card with slots and sessions as in `load`."""
        slots, sessions, waiting = load.slots, load.sessions, load.waiting
        return replace(self._card, slots=slots, sessions=sessions, waiting=waiting)

    async def command(self, spec: c.SessionSpec) -> OpenCommand:
        """A session's spec in tokens.

        Raises:
            InvalidRequest: the prompt has no tokens, has images that cannot be read, or exceeds the
                context with max_tokens; the structured output is not supported.
        """
        text, images = self._text, spec.prompt.images
        if not self._read_images:
            refuse_images(spec.prompt)
        check_prompt_bytes(spec.prompt, self._card.max_prompt_bytes, self._card.context_tokens)
        # A long prompt takes a second of the processor: a tenant has one at a time read.
        texts = [turn.text for turn in spec.prompt.turns]
        texts += [
            part for tool in spec.prompt.tools for part in (tool.description, tool.parameters)
        ]
        is_long = sum(map(len, texts)) > _LONG_CHARACTERS
        turn = self._turns.setdefault(spec.cache_salt, asyncio.Lock())
        if is_long:
            await turn.acquire()
        reading = asyncio.ensure_future(self._in_thread(lambda: text.read(spec.prompt)))
        if is_long:  # the thread reads on where its caller has left
            reading.add_done_callback(lambda _: turn.release())
        encoded, form = await asyncio.shield(reading)
        prompt_ids: Sequence[int] = encoded
        read: Any = None
        if images and self._read_images:
            prompt_ids, read = await self._read_images(prompt_ids, images, spec.cache_salt)
        sampling = spec.sampling_after(len(prompt_ids), self._card.context_tokens)
        if prompt_ids or not images:  # else only a server counts them
            self._check_context(len(prompt_ids), sampling.max_tokens)
        output, path = self._output(spec.prompt, sampling, form)
        sampling = replace(sampling, structured_output=output)
        return OpenCommand(
            prompt_ids,
            spec.n,
            sampling,
            spec.first_round_tokens,
            text.stop_texts(spec.sampling.stop),
            spec.cache_salt,
            await self._grammars.compiled(output, spec.cache_salt, path) if output else None,
            text.answers(spec.sampling),
            spec.weight,
            spec.first_id,
            read,
            form,
        )

    def _output(
        self, prompt: c.Prompt, sampling: c.Sampling, form: c.AnswerForm
    ) -> tuple[c.StructuredOutput | None, str]:
        """What complete answers conform to, and the field that is refused where it cannot be.

        Raises:
            InvalidRequest: a part is not supported; reasoning cannot be bounded.
        """
        output, special_ids = sampling.structured_output, self._grammars.special_ids
        tokens = {text: id_ for text, id_ in self._text.marks.items() if id_ in special_ids}
        path = path_of(output) if output else "sampling.max_thinking_tokens"
        path = "prompt.tools" if form.tool_format else path
        if sampling.max_thinking_tokens and not (
            self._has_grammars and form.thinking_end in tokens
        ):
            reason = "no token of the model marks the end of its reasoning"
            reason = reason if self._has_grammars else "the endpoint has no grammars of llguidance"
            violation = Violation("sampling.max_thinking_tokens", f"must be absent: {reason}")
            raise InvalidRequest([violation])
        if not self._has_grammars:
            return output, path  # calls are not constrained; invalid ones are vetoed
        repeats = self._text.repeats_calls
        try:
            return constrained(prompt, sampling, form, tokens, may_repeat=repeats), path
        except ValueError as error:
            raise InvalidRequest([refusal(path, error)]) from None

    async def round(self, batch: PrefixBatch, sampling: c.Sampling) -> c.Round:
        return await self._in_thread(lambda: self.part(batch, sampling))

    def part(self, batch: PrefixBatch, sampling: c.Sampling) -> c.Round:
        """`round` without a thread: a part has one candidate's tokens of 50 ms."""
        has_logprobs, position = sampling.logprobs, (batch.ended_by, batch.num_tokens, batch.slots)
        candidates = tuple(prefix.candidate(logprobs=has_logprobs) for prefix in batch.prefixes)
        tokens = named_tokens(candidates, self._text.token) if has_logprobs else ()
        return c.Round(candidates, *position, tokens, num_live=batch.num_live)

    async def _in_thread(self, do: Callable[[], T]) -> T:
        def timed() -> T:
            with self._clock.working():
                return do()

        return await asyncio.to_thread(timed)

    def _check_context(self, prompt_tokens: int, max_tokens: int) -> None:
        limit = self._card.context_tokens
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

    fingerprint = ""  # the servicer has the generator's
    costly_rounds = False

    def __init__(
        self,
        engine: EngineThread,
        frontend: Frontend,
        session_id: int,
        command: OpenCommand,
        opened: Opened,
    ) -> None:
        self._engine, self._frontend, self._id = engine, frontend, session_id
        self._sampling = command.sampling
        self.n, self.reduced = opened.n, opened.reduced
        self.prompt_tokens = len(command.prompt_ids)
        self.max_tokens = command.sampling.max_tokens
        self.answer_form = command.answer_form

    async def extend(self, until_tokens: int, report: c.Report | None = None) -> c.Round:
        loop = asyncio.get_running_loop()

        def receive(part: PrefixBatch) -> None:
            if report and not ended.done():  # else it was cancelled
                report(self._frontend.part(part, self._sampling))

        def post(part: PrefixBatch) -> None:
            loop.call_soon_threadsafe(receive, part)

        growing = self._engine.extend(self._id, until_tokens, post if report else None)
        ended = asyncio.wrap_future(growing)
        return await self._frontend.round(await ended, self._sampling)

    async def prune(self, keep: Collection[int], forks: c.Forks = c.NO_FORKS) -> c.Pruned:
        return await asyncio.wrap_future(self._engine.prune(self._id, keep, forks))


class LocalGenerator:
    """A `Generator` on an engine of this process."""

    def __init__(self, engine: EngineThread, text: Text, card: c.GeneratorDescription) -> None:
        self._engine = engine
        self._frontend = Frontend(text, card)

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[LocalSession]:
        command = await self._frontend.command(spec)
        session_id, opened = self._engine.open(command)
        try:
            admitted = await asyncio.wrap_future(opened)
            yield LocalSession(self._engine, self._frontend, session_id, command, admitted)
        finally:
            await asyncio.wrap_future(self._engine.close(session_id))

    async def check(self, spec: c.SessionSpec) -> None:
        await self._frontend.command(spec)

    async def describe(self) -> c.GeneratorDescription:
        return self._frontend.description(self.load())

    def load(self) -> Load:
        """Slots and sessions as of now; from any thread."""
        engine = self._engine.engine
        return Load(engine.gauge(), len(engine.sessions), len(engine.queue))

    def heartbeat_s(self) -> float:
        return max(self._engine.heartbeat_s(), self._frontend.heartbeat_s())

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.stop()
