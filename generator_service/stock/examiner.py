"""Finds out what a server with OpenAI's API can do, by small requests when the generator starts."""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any
from zlib import crc32

from generator_service.engine.text import Text, TokenDecoder
from generator_service.settings import GeneratorSettings
from generator_service.stock import api
from generator_service.stock.server import Server, reading
from specrej.answer_form import parts_of
from specrej.contracts import Grammar, Image, JsonSchema, Message, Prompt, TextPart, Tool
from specrej.contracts.errors import InternalError, InvalidRequest, Unavailable
from specrej_models.hub import find
from specrej_models.probe import Examined, examine

log = logging.getLogger(__name__)

_PROBE = Prompt(text="The quick brown fox jumps over the lazy dog. The")
_CHAT = {"messages": [{"role": "user", "content": "Count from one to nine in words."}]}
_PROBE_TOKENS = 8
# Drawn at once, as the candidates of a session are: batches change the numbers of some servers.
_SEEDS = (1, 1, 1, 1, 2)
# 64 x 64 white pixels.
_PICTURE = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAAFElEQVR42mP8zwABTAyjjFEGyQwAzx8Bf7QK4E8A"
    "AAAASUVORK5CYII="
)
_COMMENT = b"tEXtComment\0" + bytes(1000)
_LONGER = b"".join(
    (
        *(_PICTURE[:33], (len(_COMMENT) - 4).to_bytes(4), _COMMENT),
        *(crc32(_COMMENT).to_bytes(4), _PICTURE[33:]),
    )
)
_SEVEN = JsonSchema(
    '{"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"],'
    ' "additionalProperties": false}'
)
_SEVEN_IN_LARK = Grammar(f"%llguidance {{}}\nstart: answer\nanswer: %json {_SEVEN.schema}")
_CALL_TOKENS = 64
_TOOL = Tool("count", "Counts.", _SEVEN.schema)


class Examiner:
    """`able`, and for a server of token ids `examined`, are set by `examine`."""

    def __init__(self, server: Server, settings: GeneratorSettings) -> None:
        self._server = server
        self._model = settings.model
        self._settings = settings
        self._text: Mapping[str, Any] = {}  # the probe as text, in the form for this server
        self.able = api.Abilities()
        self.examined: Examined | None = None

    async def examine(self, tokenizer: str) -> None:
        """Examine the server; `tokenizer`: where that of its model is, or empty.

        Raises:
            ValueError: the server does not have the model.
            OSError: there is no such tokenizer.
            SpecrejError: the server does not answer, or not as the API does.
        """
        entry = await self._entry()
        with reading():
            limits = (entry.get("max_model_len"), (entry.get("meta") or {}).get("n_ctx"))
            context_tokens = next((int(one) for one in limits if one), 0)
        kind = f"{entry.get('owned_by', '')}"
        self.able = api.Abilities(
            kind if kind in api.KNOWN else "openai", context_tokens=context_tokens
        )
        self.examined = await self._tokenizer(tokenizer, f"{entry.get('root') or self._model}")
        if self.examined:
            await self._examine_ids(self.examined)
        if not self.able.ids:
            self.examined = None
        self._text = {"prompt": _PROBE.text} if self.able.ids else _CHAT
        if not self.able.ids:
            await self._examine_logprobs()
            await self._examine_seeds(self._text)
        await self._examine_streams()
        await self._examine_structured()
        await self._examine_images()
        await self._examine_tools()

    async def _entry(self) -> Mapping[str, Any]:
        """The server's entry of the model; empty if it has no list of models."""
        listed = await self._server.get("/models")
        if listed is None:
            return {}
        with reading():
            entries = {str(entry["id"]): dict(entry) for entry in listed["data"]}
        if self._model not in entries:
            names = ", ".join(sorted(entries)) or "none"
            raise ValueError(f"{self._server.url} has no model {self._model}; it has: {names}")
        return entries[self._model]

    async def _tokenizer(self, given: str, guessed: str) -> Examined | None:
        """The examined files of the model's tokenizer, which may be guessed."""

        def load() -> Examined:
            files, settings = find(given or guessed, weights=False), self._settings
            return examine(
                files.directory,
                tool_format=settings.tool_format,
                thinking_marks=settings.thinking_marks,
            )

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
        probe = {"prompt": text.encode(_PROBE)}
        more = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        for least in (0, 1):
            try:
                reply = await self._ask({**probe, **more, "logprobs": least})
                part, written = api.part_of(reply, 0, 0, has_ids=True), api.text_of(reply)
            except (InvalidRequest, InternalError) as error:
                log.info("no token ids with logprobs %d: %s", least, error)
                continue
            if not part.token_ids:
                continue
            ours = TokenDecoder(text)(part.token_ids).rstrip("\ufffd")  # vLLM leaves it out
            if not (ours and written.startswith(ours)):
                log.warning(
                    "no token ids: the tokenizer is not the server's: %r, %r", ours, written
                )
                return
            version = f"{reply.get('system_fingerprint') or ''}"
            self.able = replace(self.able, ids=True, least_logprobs=least, version=version)
            await self._examine_seeds(probe)
            return
        log.warning("no token ids: the server does not return them")

    async def _examine_logprobs(self) -> None:
        """Whether chats have log-probabilities."""
        try:
            reply = await self._ask({**_CHAT, "logprobs": True})
        except InvalidRequest:
            reply = await self._ask(_CHAT)
        api.part_of(reply, 0, 0, has_ids=False)  # raises if the number of tokens is unknown
        with reading():
            has_logprobs = bool(reply["choices"][0].get("logprobs"))
        self.able = replace(self.able, least_logprobs=0 if has_logprobs else None)

    async def _examine_seeds(self, probe: Mapping[str, Any]) -> None:
        """Whether equal seeds give equal texts, and others other ones."""
        if self.able.kind == "llamacpp":
            return  # its logits depend on the batch, which this would not notice each time
        draw: dict[str, Any] = {"temperature": 1.5, "top_p": 1.0, "max_tokens": 2 * _PROBE_TOKENS}
        if self.able.kind in api.KNOWN:
            draw |= {"top_k": -1, "min_p": 0.0}
        with suppress(InvalidRequest):
            asks = (self._ask({**probe, **draw, "seed": seed}) for seed in _SEEDS)
            *equal, other = map(api.text_of, await asyncio.gather(*asks))
            self.able = replace(self.able, seeds=len({*equal}) == 1 and other not in equal)

    async def _examine_streams(self) -> None:
        """Whether text arrives in parts, requested as candidates are."""
        able, num_parts = self.able, 0
        body = {**self._text, "stream": True}
        if able.least_logprobs is not None:  # with which some servers send all text at the end
            body["logprobs"] = able.least_logprobs if "prompt" in body else True
        sent = self._body(body)
        try:
            async for message in self._server.messages(_path(sent), sent, ""):
                num_parts += bool(api.part_of(message, 0, 0, has_ids=False).text)
        except (InvalidRequest, InternalError, Unavailable) as error:
            log.info("no streams: %s", error)
        self.able = replace(able, streams=num_parts > 1)

    async def _examine_structured(self) -> None:
        for name in ("structured_outputs", "json_schema", "response_format"):
            # Greedy: white space that is drawn may have any length.
            body = {**self._text, **api.structured_field(_SEVEN, name), "temperature": 0.0}
            with suppress(InvalidRequest, InternalError, ValueError, LookupError, TypeError):
                reply = await self._ask({**body, "max_tokens": 4 * _PROBE_TOKENS})
                if json.loads(api.text_of(reply))["a"] == 7:
                    self.able = replace(self.able, structured=name)
                    return

    async def _examine_tools(self) -> None:
        """Whether calls can be made valid by a grammar; of chats, whether the server has calls."""
        errors = InvalidRequest, InternalError, Unavailable, ValueError, LookupError, TypeError
        with suppress(*errors):
            if self.able.ids and self.able.structured == "structured_outputs":
                body = {**self._text, **api.structured_field(_SEVEN_IN_LARK, self.able.structured)}
                reply = await self._ask({**body, "temperature": 0.0, "max_tokens": _CALL_TOKENS})
                self.able = replace(self.able, grammars=json.loads(api.text_of(reply))["a"] == 7)
            elif not self.able.ids:
                prompt = Prompt(tools=(_TOOL,), tool_choice="required", tool_name=_TOOL.name)
                auto = Prompt(tools=(_TOOL,))  # which some refuse
                await self._ask({**_CHAT, **api.tools_of(auto)})
                body = {**_CHAT, **api.tools_of(prompt), "max_tokens": _CALL_TOKENS}
                text = api.PartsAsText()((await self._ask(body))["choices"][0])
                parts = parts_of(text, api.TEXT_CALLS, complete=True)
                calls = parts.tool_calls if parts else ()
                has_calls = [call.name for call in calls] == [_TOOL.name]
                self.able = replace(self.able, tools=has_calls)

    async def _examine_images(self) -> None:
        """Whether an image adds to the tokens of a prompt, and as many if its file is longer: else
        the URI is text to the model."""
        text, counts = TextPart("Why?"), list[int]()
        with suppress(InvalidRequest, InternalError, Unavailable, LookupError, TypeError):
            for images in ([], [Image(_PICTURE)], [Image(_LONGER)]):
                content = Message("user", parts=(text, *images)).chat_content
                reply = await self._ask({"messages": [{"role": "user", "content": content}]})
                counts.append(reply["usage"]["prompt_tokens"])
            nothing, image, longer = counts
            self.able = replace(self.able, images=nothing < image == longer)

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        """The one message of a request that is no stream."""
        sent = self._body(body)
        async with aclosing(self._server.messages(_path(sent), sent, "")) as messages:
            return await anext(messages)

    def _body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "max_tokens": _PROBE_TOKENS, **body}


def _path(body: Mapping[str, Any]) -> str:
    return "/completions" if "prompt" in body else "/chat/completions"
