"""A server with OpenAI's API as the stock engine's program: vLLM, llama.cpp, a provider.

What a server can do is found out when the generator starts. If it takes and returns token ids, and
the model's tokenizer is here, candidates are rounds of requests. Otherwise each is one request of
text, read as a stream if the server has streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from generator_service.engine.commands import Load, OnStep, OpenCommand, PrefixBatch
from generator_service.engine.generator import Frontend
from generator_service.engine.grammar import path_of, refusal
from generator_service.engine.text import Text
from generator_service.settings import GeneratorSettings
from generator_service.stock import api
from generator_service.stock.examiner import Examiner
from generator_service.stock.generator import ServedText, StockGenerator
from generator_service.stock.requests import Ask, Part
from generator_service.stock.server import Server
from specrej import contracts as c
from specrej import fingerprint
from specrej.contracts.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    Violation,
)
from specrej.contracts.validation import check_images, refuse_images
from specrej_models.tools import JSON_CALLS

log = logging.getLogger(__name__)

_UNKNOWN_CONTEXT, _UNKNOWN_VOCABULARY = 131_072, 1_000_000
_AUTO_CANDIDATES = 8
_PAUSE_S = 2.0  # until a server that does not answer is asked again, at the start
_NO_IDS = "the endpoint is sent text and sends no token ids"


class EndpointRequests:
    """`Requests` to a server."""

    def __init__(
        self,
        server: Server,
        model: str,
        able: api.Abilities,
        end_ids: frozenset[int],
        text: Text | None = None,
    ) -> None:
        self._server = server
        self._model = model
        self._able = able
        self._end_ids = end_ids
        self._hides_for = text if able.hides_tokens else None

    async def generate(self, ask: Ask) -> AsyncGenerator[Part, None]:
        """As `Requests.generate`.

        What seems to be the last tokens is kept back until the server's usage is there, which ends
        a stream.
        """
        path, body = api.request_of(ask, self._model, self._able)
        made, top = len(ask.token_ids), ask.command.sampling.top_logprobs
        as_text = api.PartsAsText() if ask.prompt.messages else None
        limit = made + ask.count
        last, usage = Part((), ()), Part((), ())
        sent = path, body, ask.session, ask.command.cache_salt
        async with aclosing(self._server.messages(*sent)) as messages:
            async for message in messages:
                if self._hides_for:
                    message = api.with_hidden(message, self._hides_for.ending_with)
                how: Any = {"has_ids": self._able.ids, "text_of_choice": as_text}
                part = api.part_of(message, made, top, left=limit - made, **how)
                if self._hides_for and made + len(part.token_ids) >= limit:
                    finish = part.finish and c.FinishReason.LENGTH
                    part = replace(part.divided(limit - made)[0], finish=finish)
                made += len(part.token_ids)
                if made > limit:
                    raise InternalError("the endpoint sends more tokens than requested")
                if part.prompt_tokens:  # some servers send it with every part
                    usage = part
                if part.token_ids or part.text:
                    if last.token_ids:
                        yield last
                    last = replace(part, prompt_tokens=0, cached_tokens=None)
                last.finish = last.finish or part.finish
                if not (last.finish or made == limit or self._ends(last)):
                    if last.token_ids:
                        yield last
                    last = Part((), ())
        yield replace(last, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)

    def heartbeat_s(self) -> float:
        """0: deadlines bound the server's silence."""
        return 0.0

    async def close(self) -> None:
        await self._server.close()

    def _ends(self, part: Part) -> bool:
        return self._able.ids and not self._end_ids.isdisjoint(part.token_ids[-1:])


class TextFrontend:
    """Commands and candidates of a server that is sent text; it counts and cuts tokens itself."""

    def __init__(self, card: c.GeneratorDescription, able: api.Abilities) -> None:
        tool_format = (api.TEXT_CALLS if able.tools else JSON_CALLS).tool_format
        self._card, self._able = replace(card, tool_format=tool_format), able

    async def command(self, spec: c.SessionSpec) -> OpenCommand:
        """As `Frontend.command`, without tokens."""
        if output := spec.sampling.structured_output:
            try:
                api.structured_field(output, self._able.structured)
            except ValueError as error:
                raise InvalidRequest([refusal(path_of(output), error)]) from None
        return OpenCommand(
            (),
            spec.n,
            spec.sampling,
            spec.first_round_tokens,
            cache_salt=spec.cache_salt,
            texts=ServedText,
            first_id=spec.first_id,
            answer_form=api.answer_form(spec.prompt, self._able),
        )

    async def round(self, batch: PrefixBatch, sampling: c.Sampling) -> c.Round:
        return self.part(batch, sampling)

    def part(self, batch: PrefixBatch, sampling: c.Sampling) -> c.Round:
        """Its candidates have no token ids."""
        made = (prefix.candidate(logprobs=False) for prefix in batch.prefixes)
        candidates = tuple(replace(one, new_token_ids=()) for one in made)
        position = batch.ended_by, batch.num_tokens, batch.slots
        return c.Round(candidates, *position, num_live=batch.num_live)

    def description(self, load: Load) -> c.GeneratorDescription:
        slots, sessions, waiting = load.slots, load.sessions, load.waiting
        return replace(self._card, slots=slots, sessions=sessions, waiting=waiting)

    def heartbeat_s(self) -> float:
        return 0.0


def refusals(spec: c.SessionSpec, able: api.Abilities) -> Iterator[Violation]:
    """What a session's spec requires of the server that it cannot do.

    Raises:
        InvalidRequest: there are images, and it takes none.
    """
    sampling, output = spec.sampling, spec.sampling.structured_output
    if not able.images:
        refuse_images(spec.prompt)
    yield from check_images(spec.prompt.images)
    yield from _refusals_of(spec.prompt, able)
    lacks: dict[str, str] = {}
    if not able.ids:
        lacks |= dict.fromkeys(("logprobs", "top_logprobs", "stop_token_ids"), _NO_IDS)
        lacks["max_thinking_tokens"] = _NO_IDS
    elif able.least_logprobs is None:
        why = "the endpoint has no log-probabilities"
        lacks |= dict.fromkeys(("logprobs", "top_logprobs"), why)
    if able.kind == "llamacpp":
        lacks["min_tokens"] = "llama.cpp's server has none"
    if not able.structured:
        lacks["structured_output"] = "the endpoint has no structured outputs"
    elif able.structured != "structured_outputs" and not isinstance(
        output, c.JsonObject | c.JsonSchema
    ):
        lacks["structured_output"] = "the endpoint takes JSON schemas only"
    for name, why in lacks.items():
        if getattr(sampling, name):
            yield Violation(f"sampling.{name}", f"must be absent: {why}")


def _refusals_of(prompt: c.Prompt, able: api.Abilities) -> Iterator[Violation]:
    """What is refused where the server renders the prompt."""
    if able.ids and not prompt.images:
        return
    if prompt.thinking is not None:
        yield Violation("prompt.thinking", "must be absent: the endpoint decides")
    if prompt.allow_special_tokens:
        yield Violation("prompt.allow_special_tokens", "must be absent: the endpoint decides")
    if able.ids and prompt.tools:
        yield Violation("prompt.tools", "must be empty with images, which the endpoint renders")


async def _as_messages(
    prompt_ids: Sequence[int], images: Mapping[str, c.Image], cache_salt: str
) -> tuple[Sequence[int], Any]:
    """As `ReadImages`, for a server, which alone knows how many tokens an image has."""
    return (), images


async def open_endpoint(
    settings: GeneratorSettings, on_step: OnStep | None = None
) -> StockGenerator:
    """A generator on the server of the settings; waits until it answers.

    Raises:
        OSError, ValueError: its key or tokenizer cannot be read; it does not have the model.
        InternalError: it refuses the key.
    """
    async with AsyncExitStack() as resources:
        server = Server(settings)
        resources.push_async_callback(server.close)
        examiner = Examiner(server, settings)
        while True:
            try:
                await examiner.examine(settings.remote_tokenizer)
                break
            except (Unavailable, Overloaded) as error:
                log.warning("%s: %s; again in %g s", server.url, error.message, _PAUSE_S)
            await asyncio.sleep(_PAUSE_S)
        resources.pop_all()
    able, examined = examiner.able, examiner.examined
    end_ids = examined.end_ids if examined else frozenset[int]()
    context_tokens = settings.context_tokens or able.context_tokens or _UNKNOWN_CONTEXT
    slots = settings.kv_slots or settings.max_candidates * context_tokens
    about = {"url": server.url, "model": settings.model, "version": able.version}
    card = c.GeneratorDescription(
        model=settings.model,
        fingerprint=fingerprint.of_values(**about, form=able.form.value),
        context_tokens=context_tokens,
        max_candidates=settings.max_candidates,
        vocabulary=examined.vocabulary if examined else _UNKNOWN_VOCABULARY,
        slot_bytes=0,
        device=f"remote {able.kind}",
        slots=c.SlotGauge(slots, 0, 0),
        auto_candidates=min(_AUTO_CANDIDATES, settings.max_candidates),
        can_fork=able.form is c.CandidateForm.ROUNDS,
        form=able.form,
        ignores_seeds=not able.seeds,
        abilities=able.names,
        takes_images=able.images,
    )
    text = Text.of(examined) if examined else None
    log.info("%s: %s; %s", server.url, able.form.value, ", ".join(able.names) or "nothing else")
    return StockGenerator(
        EndpointRequests(server, settings.model, able, end_ids, text),
        Frontend(text, card, _as_messages, has_grammars=able.grammars)
        if text
        else TextFrontend(card, able),
        end_ids,
        card,
        can_stream=able.streams,
        max_waiting=settings.max_waiting,
        refusals=partial(refusals, able=able),
        on_step=on_step,
    )
