"""A server with OpenAI's API as the stock engine's program: vLLM, llama.cpp, a provider.

What a server can do is found out when the generator starts (`Examiner`). If it takes and returns
token ids, and the model's tokenizer is here, candidates are rounds of requests. Otherwise each is
one request of text, read as a stream if the server has streams.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from generator_service.engine.commands import (
    Load,
    OnStep,
    OpenCommand,
    PrefixBatch,
    Top,
)
from generator_service.engine.generator import Frontend
from generator_service.engine.grammar import json_schema_of
from generator_service.engine.sampling import LEAST_LOGPROB
from generator_service.engine.text import Text, TokenDecoder
from generator_service.settings import GeneratorSettings
from generator_service.stock.generator import ServedText, StockGenerator
from generator_service.stock.requests import Ask, Part, continues_exactly, structured_fields
from generator_service.stock.server import UNREADABLE, Server, encodable, unreadable
from specrej import fingerprint
from specrej.contracts import (
    NO_PROBE,
    CandidateForm,
    FinishReason,
    Generator,
    GeneratorDescription,
    JsonObject,
    JsonSchema,
    Prompt,
    Round,
    Sampling,
    SessionSpec,
    SlotGauge,
)
from specrej.contracts.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    SpecrejError,
    Unavailable,
    Violation,
)
from specrej.contracts.requests import MAX_INT32
from specrej_models.hub import find
from specrej_models.probe import Examined, examine

log = logging.getLogger(__name__)

_ROUNDING = 1e-3  # of a log-probability near 0, which may be above it
_UNKNOWN_CONTEXT, _UNKNOWN_VOCABULARY = 131_072, 1_000_000
_AUTO_CANDIDATES = 8
_PAUSE_S = 2.0  # until a server that does not answer is asked again, at the start
# Servers whose own defaults, or those of the model's files, differ from ours, and their names of
# fields beyond OpenAI's.
_KNOWN = ("vllm", "sglang", "llamacpp")
_CANCEL_ALL = ("vllm", "sglang")  # when the connection closes, streams or not
_PENALTIES = {name: name for name in ("presence_penalty", "frequency_penalty")}
_MORE_NAMES = {name: name for name in ("top_k", "min_p", "repetition_penalty")}
_LLAMA_NAMES = {**_MORE_NAMES, "repetition_penalty": "repeat_penalty"}
_LLAMA_WINDOW = 131_072  # tokens that its penalties look back on
_NO_IDS = "the endpoint is sent text and sends no token ids"
_PROBE = Prompt(text="The quick brown fox jumps over the lazy dog. The")
_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server can do.

    `kind`: "vllm", "llamacpp", or what its list of models says. `ids`: it takes token ids and
    returns them. `least_logprobs`: to be requested; None: it has none. `structured`: the field for
    structured outputs, or empty.
    """

    kind: str = ""
    version: str = ""
    context_tokens: int = 0
    ids: bool = False
    streams: bool = False
    seeds: bool = False
    least_logprobs: int | None = None
    structured: str = ""

    @property
    def form(self) -> CandidateForm:
        if self.ids:
            return CandidateForm.ROUNDS
        return CandidateForm.STREAMS if self.streams else CandidateForm.WHOLE_ANSWERS

    @property
    def names(self) -> tuple[str, ...]:
        """For people."""
        found = {
            "token ids": self.ids,
            "streams": self.streams,
            "seeds": self.seeds,
            "log-probabilities": self.least_logprobs is not None,
            f"structured outputs ({self.structured})": self.structured,
        }
        return tuple(name for name, is_there in found.items() if is_there)


class EndpointRequests:
    """`Requests` to a server."""

    def __init__(self, server: Server, model: str, abilities: Abilities) -> None:
        self._server = server
        self._model = model
        self._abilities = abilities

    async def generate(self, ask: Ask) -> AsyncGenerator[Part, None]:
        """As `Requests.generate`."""
        path, body = self._request(ask)
        made = len(ask.token_ids)
        async with aclosing(self._server.messages(path, body, ask.session)) as messages:
            async for message in messages:
                part = self._read(message, made, ask.command.sampling.top_logprobs)
                made += len(part.token_ids)
                if made > len(ask.token_ids) + ask.count:
                    raise InternalError("the endpoint sends more tokens than requested")
                yield part

    def heartbeat_s(self) -> float:
        """0: deadlines bound the server's silence."""
        return 0.0

    async def close(self) -> None:
        await self._server.close()

    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        sampling, able, prompt = ask.command.sampling, self._abilities, ask.prompt
        body: dict[str, Any] = {"model": self._model, "max_tokens": ask.count, "seed": ask.seed}
        body |= _sampling_fields(sampling, able)
        if ask.min_tokens:
            body["min_tokens"] = min(ask.min_tokens, ask.count)
        # llama.cpp's server, for one, goes on with a request that is not a stream after its caller
        # has left.
        if able.streams and (ask.interval == 1 or able.kind not in _CANCEL_ALL):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if sampling.structured_output:
            body |= _structured(sampling, able)
        if able.ids:
            ids = [*ask.command.prompt_ids, *ask.token_ids]
            logprobs = max(able.least_logprobs or 0, sampling.top_logprobs)
            body |= {"prompt": ids, "logprobs": logprobs}
            body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
            return "/completions", body
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if prompt.text:
            if able.least_logprobs is not None:
                body["logprobs"] = able.least_logprobs
            return "/completions", {**body, "prompt": prompt.text}
        if able.least_logprobs is not None:
            body["logprobs"] = True
        if prompt.continue_final:  # as vLLM's API has it
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        turns = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
        return "/chat/completions", {**body, "messages": turns}

    def _read(self, message: Any, made: int, most: int) -> Part:
        """A message's tokens; `made`: tokens that the answer has already.

        Raises:
            InternalError: it has another form than the API's, or numbers that cannot be.
        """
        try:
            part = _part(message, made, most, has_ids=self._abilities.ids)
            numbers = [*part.logprobs, *(value for _, values in part.top for value in values)]
            if not all(math.isfinite(one) and one < _ROUNDING for one in numbers):
                raise ValueError("log-probabilities must be finite and at most 0")
            if len(part.logprobs) != len(part.token_ids):
                raise ValueError("tokens and log-probabilities must be equally many")
        except (ArithmeticError, AttributeError, LookupError, *UNREADABLE) as error:
            raise unreadable(error) from error
        return part


def _part(message: Any, made: int, most: int, *, has_ids: bool) -> Part:
    """The part in a message of one of the API's forms: of chats or not, whole or of a stream."""
    choice = message["choices"][0] if message["choices"] else {}
    usage = message.get("usage") or {}
    given, top = choice.get("logprobs") or {}, list[Top]()
    if content := given.get("content"):  # of chats, and of llama.cpp
        logprobs = [float(token["logprob"]) for token in content]
        ids = [int(token["id"]) for token in content] if has_ids else []
        if has_ids and most:
            best = [token["top_logprobs"][:most] for token in content]
            top = [_top([(int(one["id"]), one["logprob"]) for one in step]) for step in best]
    else:
        values = given.get("token_logprobs") or ()
        logprobs = [float(value) for value in values if value is not None]
        ids = [int(token_id) for token_id in choice.get("token_ids") or ()]
        if has_ids and most:
            steps = [[*step.items()][:most] for step in given["top_logprobs"]]
            top = [_top([(int(name.rpartition(":")[2]), p) for name, p in step]) for step in steps]
    text = ""
    if not has_ids:
        text = _text(choice)
        is_whole = "message" in choice or (choice.get("finish_reason") and usage and not made)
        count = len(logprobs) or (_count(usage["completion_tokens"]) if is_whole else bool(text))
        logprobs = logprobs or [0.0] * count
        ids = [*range(made, made + count)]
    finish = choice.get("finish_reason")
    # A filtered answer is not complete.
    reason = finish and (FinishReason.STOP if finish == "stop" else FinishReason.LENGTH)
    part = Part(ids, [min(0.0, one) if one < _ROUNDING else one for one in logprobs], top, text)
    part.finish = reason or None
    if usage:
        part.prompt_tokens = _count(usage["prompt_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            part.cached_tokens = min(part.prompt_tokens, _count(cached))
    return part


def _text(choice: Mapping[str, Any]) -> str:
    text = choice.get("text")
    if text is None:
        text = (choice.get("message") or choice.get("delta") or {}).get("content")
    if not isinstance(text, str | None):
        raise TypeError("the text must be a string")
    return encodable(text or "")


def _top(step: Sequence[tuple[int, float]]) -> Top:
    return [number for number, _ in step], [max(float(value), LEAST_LOGPROB) for _, value in step]


def _count(value: Any) -> int:
    count = int(value)
    if not 0 <= count <= MAX_INT32:
        raise ValueError("counts of tokens must be from 0 to 2**31 - 1")
    return count


def _sampling_fields(sampling: Sampling, able: Abilities) -> dict[str, Any]:
    """Fields of the body by the server's names. Servers that read defaults from the model receive
    all, others only those of OpenAI's and what differs from the defaults."""
    is_llama, default = able.kind == "llamacpp", Sampling()
    more = _LLAMA_NAMES if is_llama else _MORE_NAMES
    body = {name: getattr(sampling, name) for name in ("temperature", "top_p")}
    for name, theirs in {**_PENALTIES, **more}.items():
        value = getattr(sampling, name)
        if value != getattr(default, name) or (able.kind in _KNOWN and name in more):
            body[theirs] = value
    if is_llama and (sampling.repetition_penalty != 1 or not continues_exactly(sampling)):
        body["repeat_last_n"] = _LLAMA_WINDOW
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.logit_bias:
        body["logit_bias"] = {str(one.token_id): one.bias for one in sampling.logit_bias}
    if sampling.stop_token_ids and not is_llama:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.bad_words:
        body["bad_words"] = list(sampling.bad_words)
    return body


def _structured(sampling: Sampling, able: Abilities) -> dict[str, Any]:
    output = sampling.structured_output
    assert output
    if able.structured == "structured_outputs":
        return {"structured_outputs": structured_fields(output)}
    assert isinstance(output, JsonObject | JsonSchema)
    if able.structured == "json_schema":
        return {"json_schema": json.loads(json_schema_of(output))}
    if isinstance(output, JsonObject):
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "answer", "schema": json.loads(output.schema), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


class TextFrontend:
    """Commands and candidates of a server that is sent text; it counts and cuts tokens itself."""

    def __init__(self, card: GeneratorDescription) -> None:
        self._card = card

    async def command(self, spec: SessionSpec) -> OpenCommand:
        """As `Frontend.command`, without tokens."""
        return OpenCommand((), spec.n, spec.sampling, spec.first_round_tokens, texts=ServedText)

    async def round(self, batch: PrefixBatch, sampling: Sampling) -> Round:
        return self.part(batch, sampling)

    def part(self, batch: PrefixBatch, sampling: Sampling) -> Round:
        """Its candidates have no token ids."""
        made = (prefix.candidate(logprobs=False) for prefix in batch.prefixes)
        candidates = tuple(replace(one, new_token_ids=()) for one in made)
        position = batch.ended_by, batch.num_tokens, batch.slots
        return Round(candidates, *position, num_live=batch.num_live)

    def description(self, load: Load) -> GeneratorDescription:
        slots, sessions, waiting = load.slots, load.sessions, load.waiting
        return replace(self._card, slots=slots, sessions=sessions, waiting=waiting)

    async def warm_up(self, generator: Generator) -> None:
        """Nothing is to be prepared."""

    def heartbeat_s(self) -> float:
        return 0.0


def refusals(spec: SessionSpec, able: Abilities) -> Iterator[Violation]:
    """What a session's spec requires of the server that it cannot do."""
    sampling, output = spec.sampling, spec.sampling.structured_output
    lacks: dict[str, str] = {}
    if not able.ids:
        lacks |= dict.fromkeys(("logprobs", "top_logprobs", "stop_token_ids"), _NO_IDS)
        if spec.prompt.allow_special_tokens:
            yield Violation("prompt.allow_special_tokens", "must be absent: the endpoint decides")
    elif able.least_logprobs is None:
        why = "the endpoint has no log-probabilities"
        lacks |= dict.fromkeys(("logprobs", "top_logprobs"), why)
    if able.kind == "llamacpp":
        lacks |= dict.fromkeys(("min_tokens", "bad_words"), "llama.cpp's server has none")
    if not able.structured:
        lacks["structured_output"] = "the endpoint has no structured outputs"
    elif able.structured != "structured_outputs" and not isinstance(
        output, JsonObject | JsonSchema
    ):
        lacks["structured_output"] = "the endpoint takes JSON schemas only"
    for name, why in lacks.items():
        if getattr(sampling, name):
            yield Violation(f"sampling.{name}", f"must be absent: {why}")


class Examiner:
    """Finds out what a server can do, by small requests."""

    def __init__(self, server: Server, model: str) -> None:
        self._server = server
        self._model = model
        self.able = Abilities()
        self.examined: Examined | None = None

    async def examine(self, tokenizer: str) -> None:
        """Set `able`, and `examined` for rounds; `tokenizer`: where it is, or empty.

        Raises:
            ValueError: the server does not have the model.
            OSError: there is no such tokenizer.
            SpecrejError: the server does not answer.
        """
        entry = await self._entry()
        limits = (entry.get("max_model_len"), (entry.get("meta") or {}).get("n_ctx"))
        context_tokens = next((int(one) for one in limits if one), 0)
        kind = f"{entry.get('owned_by', '')}"
        self.able = Abilities(kind if kind in _KNOWN else "openai", context_tokens=context_tokens)
        self.examined = await self._tokenizer(tokenizer, f"{entry.get('root') or self._model}")
        if self.examined:
            await self._examine_ids(self.examined)
        if not self.able.ids:
            self.examined = None
            await self._examine_text()
        await self._examine_streams()
        await self._examine_structured()

    async def _entry(self) -> Mapping[str, Any]:
        """The server's entry of the model; empty if it has no list of models."""
        listed = await self._server.get("/models")
        if listed is None:
            return {}
        try:
            entries = {str(entry["id"]): entry for entry in listed["data"]}
        except (LookupError, *UNREADABLE) as error:
            raise unreadable(error) from error
        if self._model not in entries:
            names = ", ".join(sorted(entries)) or "none"
            raise ValueError(f"{self._server.url} has no model {self._model}; it has: {names}")
        return dict(entries[self._model])

    async def _tokenizer(self, given: str, guessed: str) -> Examined | None:
        """The examined files of the model's tokenizer, which may be guessed."""

        def load() -> Examined:
            files = find(given or guessed, weights=False)
            return examine(files.directory, files.gguf_file)

        try:
            return await asyncio.to_thread(load)
        except (OSError, ValueError) as error:
            if given:
                raise
            log.warning("no token ids: there is no tokenizer (remote_tokenizer): %s", error)
            return None

    async def _examine_ids(self, examined: Examined) -> None:
        """Whether the server takes and returns the ids of this tokenizer."""
        text = Text.of(examined)
        prompt_ids = text.encode(_PROBE)
        body = {"prompt": prompt_ids, "max_tokens": _PROBE_TOKENS, "temperature": 0.0}
        for least in (0, 1):
            more = {"return_token_ids": True, "logprobs": least}
            try:
                reply = await self._ask("/completions", {**body, **more})
                part = _part(reply, 0, 0, has_ids=True)
                written = f"{reply['choices'][0]['text']}"
            except (InvalidRequest, LookupError, *UNREADABLE) as error:
                log.info("no token ids: %s", error)
                return
            if not part.token_ids or len(part.logprobs) != len(part.token_ids):
                continue
            ours = TokenDecoder(text)(part.token_ids)
            if part.prompt_tokens not in (0, len(prompt_ids)) or not written.startswith(ours):
                log.warning(
                    "no token ids: the tokenizer is not the server's: %r, %r", ours, written
                )
                return
            self.able = replace(
                self.able,
                ids=True,
                least_logprobs=least,
                version=f"{reply.get('system_fingerprint') or ''}",
            )
            self.able = replace(self.able, seeds=await self._honours_seeds(body))
            return
        log.warning("no token ids: the server does not return them")

    async def _examine_text(self) -> None:
        """Log-probabilities and seeds of chats."""
        body = {**_CHAT, "max_tokens": _PROBE_TOKENS}
        with_logprobs = {"logprobs": True}
        try:
            reply = await self._ask("/chat/completions", {**body, **with_logprobs})
            has_logprobs = bool(_part(reply, 0, 0, has_ids=False).logprobs)
            has_logprobs &= bool(reply["choices"][0].get("logprobs"))
        except InvalidRequest:
            has_logprobs = False
        except (LookupError, *UNREADABLE) as error:
            raise unreadable(error) from error
        least = 0 if has_logprobs else None
        seeds = await self._honours_seeds(body)
        self.able = replace(self.able, least_logprobs=least, seeds=seeds)

    async def _honours_seeds(self, body: Mapping[str, Any]) -> bool:
        """Whether equal seeds give equal texts, and others other ones."""
        path = "/completions" if "prompt" in body else "/chat/completions"
        texts = []
        for seed in (1, 1, 2):
            draw = {"temperature": 1.5, "top_p": 1.0, "seed": seed, "max_tokens": 2 * _PROBE_TOKENS}
            if self.able.kind in _KNOWN:
                draw |= {"top_k": 0, "min_p": 0.0}
            try:
                reply = await self._ask(path, {**body, **draw})
            except InvalidRequest:
                return False
            texts.append(_text(reply["choices"][0]))
        return texts[0] == texts[1] != texts[2]

    async def _examine_streams(self) -> None:
        body: dict[str, Any] = {**_CHAT, "stream": True}
        path = "/chat/completions"
        if self.examined:
            path, body = "/completions", {"prompt": _PROBE.text, "stream": True}
        count = 0
        try:
            async for _ in self._server.messages(path, self._body(body), ""):
                count += 1
        except (InvalidRequest, InternalError, Unavailable) as error:
            log.info("no streams: %s", error)
        self.able = replace(self.able, streams=count > 2)

    async def _examine_structured(self) -> None:
        schema = JsonSchema(
            '{"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}'
        )
        sampling = Sampling(structured_output=schema)
        path, prompt = "/chat/completions", dict[str, Any](_CHAT)
        if self.examined:
            path, prompt = "/completions", {"prompt": _PROBE.text}
        names = (
            ("structured_outputs",) if self.examined else ("structured_outputs", "response_format")
        )
        for name in names:
            able = replace(self.able, structured=name)
            body = {**prompt, "max_tokens": 2 * _PROBE_TOKENS, **_structured(sampling, able)}
            try:
                reply = await self._ask(path, body)
                is_kept = json.loads(_text(reply["choices"][0]))["a"] == 7
            except (InvalidRequest, LookupError, *UNREADABLE):
                continue
            if is_kept:
                self.able = able
                return

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The one message of a request that is no stream."""
        async with aclosing(self._server.messages(path, self._body(body), "")) as messages:
            return await anext(messages)

    def _body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "max_tokens": _PROBE_TOKENS, **body}


_CHAT = {"messages": [{"role": "user", "content": "Count from one to nine in words."}]}


async def open_endpoint(
    settings: GeneratorSettings, on_step: OnStep | None = None
) -> StockGenerator:
    """A generator on the server of the settings; waits until it answers.

    Raises:
        OSError, ValueError: its key or tokenizer cannot be read; it does not have the model.
        InternalError: it refuses the key.
    """
    server = Server(settings)
    examiner = Examiner(server, settings.model)
    while True:
        try:
            await examiner.examine(settings.remote_tokenizer)
            break
        except SpecrejError as error:
            if not isinstance(error, Unavailable | Overloaded):
                raise
            log.warning("%s: %s; again in %g s", server.url, error.message, _PAUSE_S)
            await asyncio.sleep(_PAUSE_S)
    able, examined = examiner.able, examiner.examined
    context_tokens = settings.context_tokens or able.context_tokens or _UNKNOWN_CONTEXT
    slots = settings.kv_slots or settings.max_candidates * context_tokens
    about = {"url": server.url, "model": settings.model, "version": able.version}
    card = GeneratorDescription(
        model=settings.model,
        fingerprint=fingerprint.of_values(**about, form=able.form.value),
        context_tokens=context_tokens,
        max_candidates=settings.max_candidates,
        vocabulary=examined.probe.vocabulary if examined else _UNKNOWN_VOCABULARY,
        slot_bytes=0,
        device=f"remote {able.kind}",
        slots=SlotGauge(slots, 0, 0),
        auto_candidates=min(settings.auto_candidates or _AUTO_CANDIDATES, settings.max_candidates),
        can_fork=able.form is CandidateForm.ROUNDS,
        probe=examined.probe if examined else NO_PROBE,
        form=able.form,
        ignores_seeds=not able.seeds,
        abilities=able.names,
    )
    log.info("%s: %s; %s", server.url, able.form.value, ", ".join(able.names) or "nothing else")
    return StockGenerator(
        EndpointRequests(server, settings.model, able),
        Frontend(Text.of(examined), card) if examined else TextFrontend(card),
        examined.end_ids if examined else frozenset(),
        card,
        can_stream=able.streams,
        max_waiting=settings.max_waiting,
        refusals=partial(refusals, able=able),
        on_step=on_step,
    )
