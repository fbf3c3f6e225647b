"""A server of OpenAI's API whose tokens are a function of its prompt's ids and the seed."""

from __future__ import annotations

import itertools
import json
import sys
from base64 import b64decode
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from generator_service.engine.commands import Step
from generator_service.settings import GeneratorSettings
from generator_service.stock.endpoint import open_endpoint
from generator_service.stock.generator import StockGenerator
from tests.reward_service.endpoint import HOLD, Endpoint, Reply, served
from tests.reward_service.tiny import make_config, make_tokenizer
from tests.serving import until

NEVER = sys.maxsize
BLOCK = 4  # tokens, of its prefix cache
EOS_ID = 2
_BYTES = {sign: bytes([byte]) for byte, sign in bytes_to_unicode().items()}
_TOKENIZER = make_tokenizer(None)


def save_tokenizer(directory: Path, *, reverses: bool = False) -> Path:
    """The files of its model but for weights; `reverses`: with other ids."""
    make_config("llama", 0).save_pretrained(directory)
    _TOKENIZER.save_pretrained(directory)
    if reverses:
        path = directory / "tokenizer.json"
        content = json.loads(path.read_text())
        vocabulary = content["model"]["vocab"]
        for token, number in vocabulary.items():
            vocabulary[token] = number if number < 3 else 261 - number
        path.write_text(json.dumps(content))
    return directory


def ids_of(text: str) -> list[int]:
    ids: list[int] = _TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def text_of(ids: Sequence[int]) -> str:
    """As UTF-8, without special tokens."""
    pieces = _TOKENIZER.convert_ids_to_tokens([one for one in ids if one > EOS_ID])
    return b"".join(_BYTES[piece] for piece in pieces).decode("utf-8", "replace")


# The field of each kind for structured outputs.
_STRUCTURED = {"vllm": "structured_outputs", "llamacpp": "json_schema", "chat": "response_format"}
_LETTERS, _SIGNS = ids_of("abcdefgh "), ids_of("!?.,;:-+*/")


def logprob_of(token_id: int) -> float:
    return -1.0 - token_id % 7


def top_of(count: int) -> dict[int, float]:
    """The most probable tokens of any step; none is drawn."""
    return {one: -(number + 1) / 16 for number, one in enumerate(_SIGNS[:count])}


def _flat(content: Any) -> str:
    """A turn's content; an image is four signs of its pixels."""
    if isinstance(content, str):
        return content
    urls = [part.get("image_url", {}).get("url", "") for part in content]
    data = [b64decode(url.partition(",")[2]) for url in urls]
    signs = [chr(ord("A") + sum(one[-40:]) % 26) * 4 for one in data]
    return "".join(p.get("text") or sign for p, sign in zip(content, signs, strict=True))


@dataclass
class Completions:
    """The server; `kind` is "vllm", "llamacpp", or "chat": of conversations only.

    Its tokens are letters, those of `says` or, with `ends`, the end token wherever it may be.
    """

    directory: Path
    kind: str = "vllm"
    streams: bool = True
    ids: bool = True  # it returns token ids
    seeds: str = "honoured"  # or "ignored", or "constant": the same tokens whatever the seed is
    logprobs: bool = True
    tools: bool = False  # chats may have them: it calls the one that is chosen, or the first twice
    images: bool = False  # chats may have them; each is four tokens
    usages: list[dict[str, Any]] = field(default_factory=list)
    _cached: set[tuple[int, ...]] = field(default_factory=set)
    _draws: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.behave()

    def behave(
        self,
        says: str = "",
        *,
        ends: bool = False,
        most: int = NEVER,
        chunk: int = 1,
        hold_after: int = NEVER,
        script: Callable[[Any, int], Reply | None] = lambda body, number: None,
        spoil: Callable[[dict[str, Any]], Any] = lambda message: message,
    ) -> None:
        """Behave so from now on.

        most: tokens of a request; chunk: tokens of a stream's message; hold_after: tokens of a
        stream that come before the release; script: other replies; spoil: changes each message.
        """
        self.says, self.ends, self.most, self.chunk = ids_of(says), ends, most, chunk
        self.hold_after, self.script, self.spoil = hold_after, script, spoil
        self.usages.clear()

    def tokens(self, ids: Sequence[int], seed: int, count: int, least: int = 0) -> list[int]:
        """New tokens after `ids`; the end token is not one of the first `least`."""
        # An answer follows an end or begin token; a raw prompt begins with one.
        start = max((n for n, one in enumerate(ids) if one <= EOS_ID), default=0) + 1
        made = list[int]()
        while len(made) < count and EOS_ID not in made:
            position = len(ids) + len(made) - start
            key = f"{seed}/{[*ids, *made]}".encode()
            drawn = int.from_bytes(blake2b(key, digest_size=4).digest())
            if self.ends and len(made) >= least and drawn % 8 == 0:
                made.append(EOS_ID)
            elif self.says:
                made.append(self.says[position % len(self.says)])
            else:
                made.append(_LETTERS[drawn % len(_LETTERS)])
        return made

    def reply(self, body: Any, number: int) -> Reply:
        """As `endpoint.Replies`."""
        if body is None:
            return self._models()
        if scripted := self.script(body, number):
            return scripted
        is_chat = "messages" in body
        if body["model"] != "m" or (self.kind == "chat" and not is_chat):
            return Reply({"error": {"message": "not here"}}, 404)
        prompt = body.get("prompt")
        if is_chat:
            turns = [turn | {"content": _flat(turn["content"])} for turn in body["messages"]]
            if not self.images and turns != body["messages"]:
                return Reply({"error": {"message": "texts only"}}, 400)
            ids = _TOKENIZER.apply_chat_template(turns)["input_ids"]
        else:
            ids = _TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
        if body.get("tools") and not self.tools:
            return Reply({"error": {"message": "no tools"}}, 400)
        if body.get("tools") and body["max_tokens"] > 20:
            return self._calls(body)
        made = self._made(ids, body)
        finish = "stop" if made[-1] == EOS_ID else "length"
        usage = self._usage(ids, made)
        if body.get("stream") and self.streams:
            lines = self._lines(body, made, finish, usage)
            return Reply(stream=lines, headers={"Content-Type": "text/event-stream"}, keeps=True)
        message = {"choices": [self._choice(body, made, text_of(made), finish)]}
        return Reply(self.spoil(message | usage | {"system_fingerprint": "v1"}), keeps=True)

    def _calls(self, body: Any) -> Reply:
        """Calls in parts, as OpenAI's API has them."""
        choice, name = body["tool_choice"], body["tools"][0]["function"]["name"]
        count = 1 if isinstance(choice, dict) else 2
        whole = [
            {"index": i, "id": f"c{i}", "function": {"name": name, "arguments": '{"a": 7}'}}
            for i in range(count)
        ]
        usage = {"usage": {"prompt_tokens": 9, "completion_tokens": 5 * count}}
        if not body.get("stream") or not self.streams:
            message = {"content": None, "tool_calls": whole}
            choices = [{"message": message, "finish_reason": "tool_calls"}]
            return Reply({"choices": choices, **usage}, keeps=True)
        deltas: list[dict[str, Any]] = [{"content": "Let"}]
        for call in whole:
            deltas.append({"tool_calls": [call | {"function": {"name": name}}]})
            for piece in ('{"a"', ": 7}"):
                part = {"index": call["index"], "function": {"arguments": piece}}
                deltas.append({"tool_calls": [part]})
        lines = [self._line({"choices": [{"delta": delta}]}) for delta in deltas]
        ended = {"choices": [{"delta": {}, "finish_reason": "tool_calls"}], **usage}
        stream = iter([*lines, self._line(ended), b"data: [DONE]\n\n"])
        return Reply(stream=stream, headers={"Content-Type": "text/event-stream"}, keeps=True)

    def _models(self) -> Reply:
        if self.kind == "chat":
            return Reply({}, 404)
        entry = {"id": "m", "owned_by": self.kind, "root": f"{self.directory}"}
        limit = {"meta": {"n_ctx": 250}} if self.kind == "llamacpp" else {"max_model_len": 250}
        return Reply({"data": [entry | limit]})

    def _made(self, ids: Sequence[int], body: Any) -> list[int]:
        seed = body.get("seed", 0) if body.get("temperature", 1.0) else 0
        seed = {"honoured": seed, "ignored": next(self._draws), "constant": 1}[self.seeds]
        if _STRUCTURED[self.kind] in body:
            return [*ids_of('{"a": 7}'), EOS_ID]
        count = min(body["max_tokens"], self.most)
        least = count if body.get("ignore_eos") else body.get("min_tokens", 0)
        return self.tokens(ids, seed, count, least)

    def _usage(self, ids: Sequence[int], made: Sequence[int]) -> dict[str, Any]:
        blocks = range((len(ids) - 1) // BLOCK * BLOCK, 0, -BLOCK)
        cached = next((end for end in blocks if tuple(ids[:end]) in self._cached), 0)
        stored = [*ids, *made][:-1]
        self._cached |= {tuple(stored[:end]) for end in range(BLOCK, len(stored) + 1, BLOCK)}
        counts = {"prompt_tokens": len(ids), "completion_tokens": len(made)}
        self.usages.append({**counts, "prompt_tokens_details": {"cached_tokens": cached}})
        return {"usage": self.usages[-1]}

    def _choice(self, body: Any, ids: list[int], text: str, finish: str | None) -> dict[str, Any]:
        is_chat, top = "messages" in body, body.get("logprobs") if self.logprobs else None
        values, best = [logprob_of(one) for one in ids], top_of(int(top or 0))
        given: Any = None
        if top is not None and not is_chat and self.kind == "vllm":
            steps = [{one: value} | best for one, value in zip(ids, values, strict=True)]
            named = [{f"token_id:{one}": step[one] for one in step} for step in steps]
            given = {"token_logprobs": values, "top_logprobs": named}
        elif top and ids:
            best = top_of(int(body.get("top_logprobs", 0))) if self.kind == "vllm" else best
            most = [self._named(one) | {"logprob": value} for one, value in best.items()]
            pairs = [
                self._named(one) | {"logprob": value}
                for one, value in zip(ids, values, strict=True)
            ]
            given = {"content": [one | {"top_logprobs": most} for one in pairs]}
        choice = {"index": 0, "logprobs": given, "finish_reason": finish}
        if self.ids and self.kind == "vllm" and body.get("return_token_ids"):
            choice["token_ids"] = ids
        if not is_chat:
            return choice | {"text": text}
        return choice | {"delta" if body.get("stream") else "message": {"content": text}}

    def _named(self, token_id: int) -> dict[str, Any]:
        return {"token": f"token_id:{token_id}"} if self.kind == "vllm" else {"id": token_id}

    def _lines(
        self, body: Any, made: list[int], finish: str, usage: dict[str, Any]
    ) -> Iterator[bytes | None]:
        """The stream: the last tokens have the finish, but with llama.cpp, where it has the usage;
        of the others the usage is alone."""
        decode, is_llama = getincrementaldecoder("utf-8")("replace"), self.kind == "llamacpp"
        for start in range(0, len(made), self.chunk):
            if start >= self.hold_after:
                yield HOLD
            ids = made[start : start + self.chunk]
            is_last = start + self.chunk >= len(made)
            pieces = _TOKENIZER.convert_ids_to_tokens([one for one in ids if one > EOS_ID])
            text = decode.decode(b"".join(_BYTES[piece] for piece in pieces), is_last)
            ended_by = finish if is_last and not is_llama else None
            yield self._line({"choices": [self._choice(body, ids, text, ended_by)]})
        choices = [self._choice(body, [], "", finish)] if is_llama else []
        yield self._line({"choices": choices, **usage})
        yield b"data: [DONE]\n\n"

    def _line(self, message: dict[str, Any]) -> bytes:
        return b"data: %s\n\n" % json.dumps(self.spoil(message), ensure_ascii=False).encode()


def settings_of(url: str, **settings: Any) -> GeneratorSettings:
    return GeneratorSettings(
        **dict[str, Any](engine="remote", model="m", remote_url=url) | settings
    )


@dataclass
class Started:
    """A server that was examined, the generator before it, and what that counts."""

    model: Completions
    endpoint: Endpoint
    generator: StockGenerator
    steps: list[Step]

    @property
    def sent(self) -> list[Any]:
        """The bodies of all requests, in an order that does not depend on time."""
        bodies = [request.body for request in self.endpoint.requests]
        return sorted(bodies, key=lambda body: (len(body.get("prompt", "")), body["seed"]))

    async def is_idle(self) -> bool:
        """Whether nothing is left of sessions."""
        load = self.generator.load()
        return not (self.endpoint.running or load.slots.owned or load.sessions or load.waiting)


@asynccontextmanager
async def started(model: Completions, **settings: Any) -> AsyncIterator[Started]:
    steps: list[Step] = []
    async with served(model.reply) as endpoint, AsyncExitStack() as resources:
        options = settings_of(f"{endpoint.url}/", **settings)
        generator = await open_endpoint(options, steps.append)
        resources.push_async_callback(generator.close)
        endpoint.requests.clear()
        yield Started(model, endpoint, generator, steps)


class Servers:
    """Servers in a directory with their tokenizer, each started at its first use."""

    def __init__(self, directory: Path, resources: AsyncExitStack) -> None:
        self.directory = directory
        self._resources = resources
        self._started: dict[str, Started] = {}

    async def get(self, kind: str = "vllm", **settings: Any) -> Started:
        """The server of a kind before a generator of these settings."""
        key = f"{kind} {settings}"
        if key not in self._started:
            opening = started(Completions(self.directory, kind), **settings)
            self._started[key] = await self._resources.enter_async_context(opening)
        return self._started[key]

    async def check(self) -> None:
        """Check that nothing is left of a test, and behave as before it."""
        for server in self._started.values():
            await until(server.is_idle, bound_s=2)
            server.model.behave()
            server.steps.clear()
            server.endpoint.requests.clear()
            server.endpoint.release.clear()
            server.endpoint.num_gone = server.endpoint.most_running = 0
