"""Answers as the objects and chunks of OpenAI's completions.

Texts are not parsed here: the orchestrator divides them into content, reasoning and calls.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, TypeVar

from specrej import contracts as c
from specrej.contracts import wire
from specrej.contracts.errors import InvalidRequest, Violation

JSON = dict[str, Any]
T = TypeVar("T")

STOPPED_BY, VERIFIED = "x-specrej-stopped-by", "x-specrej-verified"
_NONE = '"choices":[]'  # texts have their quotes escaped
_AT_ONCE = 16  # tokens of which an answer's values are made into JSON
_LARGE = ThreadPoolExecutor(1, "large-answers")


async def in_thread(convert: Callable[[], T], *, is_large: bool) -> T:
    """Return `convert()`, computed in a thread, because it would block the event loop.

    Large answers, those with log-probabilities, are converted one at a time.
    """
    executor = _LARGE if is_large else None
    return await asyncio.get_running_loop().run_in_executor(executor, convert)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _chat_logprobs(candidate: c.RankedCandidate, start: int = 0, end: int | None = None) -> JSON:
    """Those of the tokens from `start` to `end`."""
    part = slice(start, end)
    tokens = candidate.tokens[part]
    tops = candidate.top_logprobs[part] or [c.TopLogprobs(())] * len(tokens)
    content = [
        {**_token(token, value), "top_logprobs": [_token(t.token, t.logprob) for t in top.tokens]}
        for token, value, top in zip(tokens, candidate.logprobs[part], tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(token: bytes, logprob: float) -> JSON:
    return {"token": wire.text_of(token), "bytes": list(token), "logprob": logprob}


def _text_logprobs(candidate: c.RankedCandidate) -> JSON:
    """Offsets are characters of the answer before each token."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    lengths = [len(decoder.decode(token)) for token in candidate.tokens]
    tops = [
        {wire.text_of(t.token): t.logprob for t in top.tokens} for top in candidate.top_logprobs
    ]
    return {
        "tokens": [*map(wire.text_of, candidate.tokens)],
        "token_logprobs": list(candidate.logprobs),
        "top_logprobs": tops or None,
        "text_offset": [*accumulate(lengths, initial=0)][:-1],
    }


def _after(sent: str, text: str) -> str:
    """The rest of a text after the beginning that it shares with what was sent.

    They differ where later bytes made an earlier character invalid.
    """
    pairs = enumerate(zip(sent, text, strict=False))
    num_equal = next((n for n, (one, other) in pairs if one != other), min(len(sent), len(text)))
    return text[num_equal:]


def _plus(sent: c.AnswerParts, delta: c.PartsDelta) -> c.AnswerParts:
    calls = dict(enumerate(sent.tool_calls))
    for part in delta.tool_calls:
        call = calls.get(part.index, c.ToolCall(part.id, part.name, ""))
        calls[part.index] = replace(call, arguments=call.arguments + part.arguments)
    content, reasoning = sent.content + delta.content, sent.reasoning + delta.reasoning
    return c.AnswerParts(content, reasoning, tuple(calls.values()))


def _rest(sent: c.AnswerParts, whole: c.AnswerParts) -> c.PartsDelta:
    """What was not sent."""
    calls, num_sent = [], len(sent.tool_calls)
    for number, call in enumerate(whole.tool_calls):
        if number >= num_sent:
            calls.append(c.ToolCallDelta(number, call.id, call.name, call.arguments))
        elif rest := _after(sent.tool_calls[number].arguments, call.arguments):
            calls.append(c.ToolCallDelta(number, arguments=rest))
    content = _after(sent.content, whole.content)
    return c.PartsDelta(content, _after(sent.reasoning, whole.reasoning), tuple(calls))


def reasoning_tokens(candidate: c.RankedCandidate) -> int:
    """The tokens of its reasoning, by its share of the characters: an estimate."""
    if not (parts := candidate.parts):
        return 0
    others = len(parts.content) + sum(len(call.name + call.arguments) for call in parts.tool_calls)
    share = len(parts.reasoning) / max(1, len(parts.reasoning) + others)
    return round(candidate.num_tokens * share)


class Answer:
    """The answer to a request, in the form of an API.

    It has `num_choices`. An answer that reaches `stop_at` is verified.
    """

    end = b""  # of a stream

    def __init__(self, model: str, num_choices: int = 1, *, stop_at: float | None = None) -> None:
        self._model = model
        self._num_choices = num_choices
        self._stop_at = stop_at
        self._created = int(time.time())
        self.request_id = ""  # of all chunks
        self._sent = c.AnswerParts()  # of the only choice
        self._generation: c.Generation  # set when it is there

    @property
    def streams_text(self) -> bool:
        """Whether text is sent before the end."""
        return self._num_choices == 1

    def body(self, generation: c.Generation) -> Iterator[str]:
        """The body of a request that does not stream, in parts.

        Raises:
            InvalidRequest: fewer candidates are complete than choices were requested.
        """
        raise NotImplementedError

    def opening(self) -> Iterator[JSON]:
        """The first chunks."""
        raise NotImplementedError

    def delta(self, event: c.TextDelta) -> Iterator[JSON]:
        """The next part of the text."""
        raise NotImplementedError

    def closing(self, generation: c.Generation) -> Iterator[JSON]:
        """What was not sent, the end of each choice, and the last chunks."""
        raise NotImplementedError

    def failure(self, status: int, body: JSON) -> JSON:
        """The last chunk of a stream that fails; `body`: OpenAI's, for a reply."""
        return body

    def headers(self, generation: c.Generation) -> dict[str, str]:
        """Headers of a reply that does not stream."""
        headers = {"x-request-id": generation.request_id}
        if generation.stopped_by:
            headers[STOPPED_BY] = generation.stopped_by.value
        if self._stop_at is not None:
            headers[VERIFIED] = str(self._verified(generation)["verified"]).lower()
        return headers

    def _chosen(self, generation: c.Generation) -> Sequence[c.RankedCandidate]:
        completed = len(generation.candidates)
        if completed < self._num_choices:
            text = (
                f"{self._num_choices} choices were requested and {completed} candidates completed:"
                " rewards have vetoed the others, or the answer is degraded"
            )
            raise InvalidRequest([Violation("n", text)])
        return generation.candidates[: self._num_choices]

    def _about(self) -> JSON:
        """What the APIs' objects have no field for."""
        generation = self._generation
        # The values and rounds of a large answer take seconds, and are omitted.
        best = replace(
            generation.candidates[0], token_ids=(), logprobs=(), tokens=(), top_logprobs=()
        )
        plain = wire.to_plain(replace(generation, candidates=(best,), rounds=()))
        omitted = ("text", "score", "finish_reason", "candidates", "rounds")
        rest = {name: value for name, value in plain.items() if name not in omitted}
        scores = [candidate.score for candidate in self._chosen(generation)]
        reason, vote = generation.stopped_by, generation.best.vote
        rest |= {"stopped_by": reason and reason.value, **({"vote": vote} if vote else {})}
        return {"specrej": {**rest, "scores": scores, **self._verified(generation)}}

    def _num_tokens(self) -> tuple[int, int]:
        """Of the prompt, and of the returned choices."""
        completion = sum(one.num_tokens for one in self._chosen(self._generation))
        return self._generation.usage.prompt_tokens, completion

    def _verified(self, generation: c.Generation) -> JSON:
        """Whether the answer is one that ends a request with `stop_at`: complete, not vetoed, and
        by its rewards, not by the likelihood of a degraded one."""
        if self._stop_at is None:
            return {}
        best = generation.best
        counts = best.finish is c.FinishReason.STOP and not best.vetoed
        counts = counts and c.Degradation.REWARD not in generation.degradations
        return {"verified": counts and best.score >= self._stop_at}


@dataclass(slots=True)
class Block:
    """A part of an answer; `text`: of a call the arguments."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    id: str = ""  # of a call
    name: str = ""


class BlockAnswer(Answer):
    """One choice as blocks, each of which begins, grows and ends; subclasses make the events."""

    def __init__(self, model: str, *, stop_at: float | None = None) -> None:
        super().__init__(model, stop_at=stop_at)
        self._blocks: list[Block] = []

    def _begun(self, index: int, block: Block) -> Iterator[JSON]:
        raise NotImplementedError

    def _grown(self, index: int, block: Block, text: str) -> Iterator[JSON]:
        raise NotImplementedError

    def _ended(self, index: int, block: Block) -> Iterator[JSON]:
        raise NotImplementedError

    def _closed(self, candidate: c.RankedCandidate) -> Iterator[JSON]:
        """The last events."""
        raise NotImplementedError

    def _whole(self, candidate: c.RankedCandidate) -> JSON:
        """The object of the whole answer."""
        raise NotImplementedError

    def body(self, generation: c.Generation) -> Iterator[str]:
        self.request_id = generation.request_id
        for _ in self.closing(generation):
            pass
        yield _json(self._whole(generation.best))

    def delta(self, event: c.TextDelta) -> Iterator[JSON]:
        return self._add(event.parts or c.PartsDelta(event.text))

    def closing(self, generation: c.Generation) -> Iterator[JSON]:
        self._generation, best = generation, generation.best
        parts = best.parts or c.AnswerParts(best.text)
        yield from self._add(_rest(self._sent, parts))
        yield from self._end_last()
        yield from self._closed(best)

    def _add(self, delta: c.PartsDelta) -> Iterator[JSON]:
        self._sent = _plus(self._sent, delta)
        pieces = [Block("reasoning", delta.reasoning), Block("text", delta.content)]
        pieces += [Block("call", call.arguments, call.id, call.name) for call in delta.tool_calls]
        for piece in pieces:
            if not piece.text and not piece.id:
                continue
            if piece.id or not self._blocks or self._blocks[-1].kind != piece.kind:
                yield from self._end_last()
                self._blocks.append(replace(piece, text=""))
                yield from self._begun(len(self._blocks) - 1, self._blocks[-1])
            if piece.text:
                self._blocks[-1].text += piece.text
                yield from self._grown(len(self._blocks) - 1, self._blocks[-1], piece.text)

    def _end_last(self) -> Iterator[JSON]:
        if self._blocks:
            yield from self._ended(len(self._blocks) - 1, self._blocks[-1])


class CompletionAnswer(Answer):
    """The answer to a request of /v1/chat/completions, or without `is_chat` /v1/completions.

    With `has_tools` a choice can be calls alone.
    """

    end = b"data: [DONE]\n\n"

    def __init__(
        self,
        model: str,
        num_choices: int = 1,
        *,
        is_chat: bool = True,
        logprobs: bool = False,
        has_tools: bool = False,
        shows_usage: bool = False,
        stop_at: float | None = None,
    ) -> None:
        super().__init__(model, num_choices, stop_at=stop_at)
        self._is_chat = is_chat
        self._logprobs = logprobs
        self._has_tools = has_tools
        self._shows_usage = shows_usage

    @property
    def streams_text(self) -> bool:
        return self._num_choices == 1 and not self._logprobs

    def body(self, generation: c.Generation) -> Iterator[str]:
        self.request_id, self._generation = generation.request_id, generation
        chunk = self._chunk([])
        kind = chunk["object"].removesuffix(".chunk")
        before, _, after = _json({**chunk, "object": kind, **self._usage()}).partition(_NONE)
        yield f'{before}"choices":['
        for index, candidate in enumerate(self._chosen(generation)):
            parts = self._parts(candidate)
            text = {"message": _message(parts)} if self._is_chat else {"text": parts.content}
            end = {"finish_reason": _finish(candidate, parts), "logprobs": None}
            choice = _json({"index": index, **text, **end}).removesuffix("null}")
            yield f",{choice}" if index else choice
            yield from self._logprobs_of(candidate)
            yield "}"
        yield f"]{after}"

    def _logprobs_of(self, candidate: c.RankedCandidate) -> Iterator[str]:
        if not self._logprobs:
            yield "null"
        elif not self._is_chat:
            yield _json(_text_logprobs(candidate))
        else:
            yield '{"content":['
            for start in range(0, len(candidate.tokens), _AT_ONCE):
                tokens = _json(_chat_logprobs(candidate, start, start + _AT_ONCE)["content"])
                yield f"{',' if start else ''}{tokens[1:-1]}"
            yield '],"refusal":null}'

    def opening(self) -> Iterator[JSON]:
        """The first chunk of each choice, with its role."""
        for index in range(self._num_choices if self._is_chat else 0):
            content = None if self._has_tools else ""
            yield self._delta(index, {"role": "assistant", "content": content})

    def delta(self, event: c.TextDelta) -> Iterator[JSON]:
        """The next part of the text, if there is one choice; log-probabilities come at its end."""
        if self.streams_text:
            parts = event.parts if self._is_chat else None
            delta = parts or c.PartsDelta(event.text)
            self._sent = _plus(self._sent, delta)
            if made := delta_of(delta):
                yield self._delta(0, made)

    def closing(self, generation: c.Generation) -> Iterator[JSON]:
        self._generation, sent = generation, self._sent
        for index, candidate in enumerate(self._chosen(generation)):
            parts = self._parts(candidate)
            rest, logprobs = delta_of(_rest(sent, parts)), None
            if self._logprobs:
                logprobs = (_chat_logprobs if self._is_chat else _text_logprobs)(candidate)
            if rest or logprobs or sent == c.AnswerParts():
                yield self._delta(index, rest or {"content": ""}, logprobs)
            last: JSON = {"delta": {}} if self._is_chat else {"text": ""}
            end = {"finish_reason": _finish(candidate, parts), "logprobs": None}
            yield self._chunk([{"index": index, **last, **end}])
        if self._shows_usage:
            yield self._chunk([]) | self._usage()

    def _parts(self, candidate: c.RankedCandidate) -> c.AnswerParts:
        """Raw text has none."""
        return (self._is_chat and candidate.parts) or c.AnswerParts(candidate.text)

    def _chunk(self, choices: list[JSON]) -> JSON:
        return {
            "id": f"chatcmpl-{self.request_id}" if self._is_chat else f"cmpl-{self.request_id}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _delta(self, index: int, delta: JSON, logprobs: JSON | None = None) -> JSON:
        text = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        choice = {"index": index, **text, "finish_reason": None, "logprobs": logprobs}
        return self._chunk([choice])

    def _usage(self) -> JSON:
        prompt, completion = self._num_tokens()
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
            "system_fingerprint": self._generation.generator_fingerprint,
            **self._about(),
        }


def _finish(candidate: c.RankedCandidate, parts: c.AnswerParts) -> str:
    is_whole = candidate.finish is c.FinishReason.STOP
    return "tool_calls" if parts.tool_calls and is_whole else candidate.finish.value


def _message(parts: c.AnswerParts) -> JSON:
    """A message; its content is null beside calls without text."""
    calls = [
        {"id": call.id, "type": "function", "function": _function(call)}
        for call in parts.tool_calls
    ]
    message: JSON = {"role": "assistant", "content": parts.content, "refusal": None}
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    return message | {"content": parts.content or None, "tool_calls": calls} if calls else message


def delta_of(parts: c.PartsDelta) -> JSON:
    """The fields of a chunk's delta that are not empty."""
    calls = [
        {"index": call.index, "id": call.id, "type": "function", "function": _function(call)}
        if call.id
        else {"index": call.index, "function": {"arguments": call.arguments}}
        for call in parts.tool_calls
    ]
    fields = {"content": parts.content, "reasoning_content": parts.reasoning, "tool_calls": calls}
    return {name: value for name, value in fields.items() if value}


def _function(call: c.ToolCall | c.ToolCallDelta) -> JSON:
    return {"name": call.name, "arguments": call.arguments}
