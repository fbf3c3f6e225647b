"""OpenAI's objects: whole answers and the chunks of streamed ones."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

from specrej.contracts import Generation, RankedCandidate, RoundCompleted, TopLogprobs, wire
from specrej.contracts.errors import InvalidRequest, Violation

JSON = dict[str, Any]
T = TypeVar("T")

_LARGE = ThreadPoolExecutor(1, "large-answers")


async def in_thread(convert: Callable[[], T], *, is_large: bool) -> T:
    """Return `convert()`, computed in a thread, because it would block the event loop.

    Large answers, those with log-probabilities, are converted one at a time.
    """
    executor = _LARGE if is_large else None
    return await asyncio.get_running_loop().run_in_executor(executor, convert)


def _chat_logprobs(candidate: RankedCandidate) -> JSON:
    tops = candidate.top_logprobs or [TopLogprobs(())] * len(candidate.tokens)
    content = [
        {**_token(token, value), "top_logprobs": [_token(t.token, t.logprob) for t in top.tokens]}
        for token, value, top in zip(candidate.tokens, candidate.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(token: bytes, logprob: float) -> JSON:
    return {"token": wire.text_of(token), "bytes": list(token), "logprob": logprob}


def _text_logprobs(candidate: RankedCandidate) -> JSON:
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
        "text_offset": [*accumulate(lengths[:-1], initial=0)],
    }


def _num_equal(first: str, second: str) -> int:
    """The length of the beginning that two texts share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(first), len(second)))


class Answer:
    """The answer to a request of /v1/chat/completions, or without `is_chat` /v1/completions."""

    def __init__(self, model: str, num_choices: int, *, is_chat: bool, logprobs: bool) -> None:
        self._model = model
        self._num_choices = num_choices
        self._is_chat = is_chat
        self._logprobs = logprobs
        self._created = int(time.time())
        self._sent = ""  # of the only choice

    def whole(self, generation: Generation) -> JSON:
        """The body of a request that does not stream.

        Raises:
            InvalidRequest: fewer candidates are complete than choices were requested.
        """
        choices: list[JSON] = []
        for index, candidate in enumerate(self._chosen(generation)):
            message = {"role": "assistant", "content": candidate.text, "refusal": None}
            text = {"message": message} if self._is_chat else {"text": candidate.text}
            choices.append({"index": index, **text, **self._end(candidate)})
        body = self._chunk(generation.request_id, choices)
        return {**body, "object": body["object"].removesuffix(".chunk"), **self._about(generation)}

    def opening(self, request_id: str) -> Iterator[JSON]:
        """The first chunk of each choice, with its role."""
        for index in range(self._num_choices if self._is_chat else 0):
            yield self._delta(request_id, index, {"role": "assistant", "content": ""})

    def round(self, request_id: str, event: RoundCompleted, style: str) -> JSON:
        """A round: `style` "rounds" is a chunk without choices, "reasoning" a line for readers."""
        if style == "rounds" or not self._is_chat:
            return self._chunk(request_id, []) | {"specrej": wire.to_plain(event)}
        trace = event.trace
        line = (
            f"round {trace.number}: token {trace.decision_token}, {trace.num_live} of"
            f" {trace.num_started} candidates live, best reward {trace.best_score:.3f}\n"
        )
        return self._delta(request_id, 0, {"reasoning_content": line})

    def delta(self, request_id: str, text: str) -> Iterator[JSON]:
        """The next part of the text, if there is one choice; log-probabilities come at its end."""
        if self._num_choices == 1 and not self._logprobs:
            self._sent += text
            yield self._delta(request_id, 0, {"content": text})

    def closing(
        self, request_id: str, generation: Generation, include_usage: bool
    ) -> Iterator[JSON]:
        """What was not sent of the text of each choice, its end, and the usage if requested."""
        for index, candidate in enumerate(self._chosen(generation)):
            end = self._end(candidate)
            # The sent text differs from the answer's where later bytes made an earlier character
            # invalid.
            rest = candidate.text[_num_equal(self._sent, candidate.text) :]
            logprobs = end.pop("logprobs")
            if rest or logprobs or not self._sent:
                yield self._delta(request_id, index, {"content": rest}, logprobs)
            last: JSON = {"delta": {}} if self._is_chat else {"text": ""}
            yield self._chunk(request_id, [{"index": index, **last, **end, "logprobs": None}])
        if include_usage:
            yield self._chunk(request_id, []) | self._about(generation)

    def _chosen(self, generation: Generation) -> Sequence[RankedCandidate]:
        completed = len(generation.candidates)
        if completed < self._num_choices:
            text = (
                f"{self._num_choices} choices were requested and {completed} candidates completed:"
                " rewards have vetoed the others, or the answer is degraded"
            )
            raise InvalidRequest([Violation("n", text)])
        return generation.candidates[: self._num_choices]

    def _chunk(self, request_id: str, choices: list[JSON]) -> JSON:
        return {
            "id": f"chatcmpl-{request_id}" if self._is_chat else f"cmpl-{request_id}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _delta(
        self, request_id: str, index: int, delta: JSON, logprobs: JSON | None = None
    ) -> JSON:
        text = {"delta": delta} if self._is_chat else {"text": delta["content"]}
        choice = {"index": index, **text, "finish_reason": None, "logprobs": logprobs}
        return self._chunk(request_id, [choice])

    def _end(self, candidate: RankedCandidate) -> JSON:
        end: JSON = {"finish_reason": candidate.finish.value, "logprobs": None}
        if self._logprobs:
            end["logprobs"] = (_chat_logprobs if self._is_chat else _text_logprobs)(candidate)
        return end

    def _about(self, generation: Generation) -> JSON:
        """The usage of the returned choices, and what OpenAI's objects have no field for."""
        prompt = generation.usage.prompt_tokens
        completion = sum(candidate.num_tokens for candidate in self._chosen(generation))
        # The candidates and rounds of a large answer take seconds, and are omitted.
        plain = wire.to_plain(replace(generation, candidates=generation.candidates[:1], rounds=()))
        omitted = ("text", "score", "finish_reason", "candidates", "rounds")
        rest = {name: value for name, value in plain.items() if name not in omitted}
        scores = [candidate.score for candidate in self._chosen(generation)]
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
            "system_fingerprint": generation.generator_fingerprint,
            "specrej": {**rest, "scores": scores},
        }
