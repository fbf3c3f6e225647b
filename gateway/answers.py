"""OpenAI's objects: whole answers and the chunks of streamed ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from specrej import wire
from specrej.contracts import Finished, Generation, RankedCandidate, RoundCompleted
from specrej.errors import InvalidRequest, Violation

JSON = dict[str, Any]


class Answer:
    """The answer to one request; `chat`: of /v1/chat/completions, else of /v1/completions."""

    def __init__(self, model: str, num_choices: int, *, chat: bool, logprobs: bool) -> None:
        self._model = model
        self._num_choices = num_choices
        self._chat = chat
        self._logprobs = logprobs
        self._created = int(time.time())
        self.request_id = ""

    def whole(self, generation: Generation) -> JSON:
        """The body of a request that does not stream.

        Raises:
            InvalidRequest: fewer candidates than choices ended by themselves or at max_tokens.
        """
        choices = [
            {
                "index": index,
                **self._text(candidate.text, whole=True),
                "finish_reason": candidate.finish.value,
                "logprobs": self._logprobs_of(candidate),
            }
            for index, candidate in enumerate(self._chosen(generation))
        ]
        return {
            **self._head(generation.request_id, "" if self._chat else "text_completion"),
            "choices": choices,
            "usage": _usage(self._chosen(generation), generation),
            "system_fingerprint": generation.generator_fingerprint,
            "specrej": about(generation),
        }

    def opening(self) -> Iterator[JSON]:
        """The first chunk of each choice: its role."""
        if self._chat:
            delta = {"role": "assistant", "content": "", "refusal": None}
            for index in range(self._num_choices):
                yield self._chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def round(self, event: RoundCompleted, style: str) -> JSON:
        """A round, as an extension of a chunk or as a line of reasoning."""
        trace = event.trace
        if style == "reasoning" and self._chat:
            line = (
                f"round {trace.number}: token {trace.decision_token}, {trace.num_live} of "
                f"{trace.num_started} candidates live, best reward {trace.best_score:.3f}\n"
            )
            delta = {"reasoning_content": line}
            return self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])
        return {**self._chunk([]), "specrej": wire.to_plain(event)}

    def closing(self, event: Finished, *, include_usage: bool) -> Iterator[JSON]:
        """The text of each choice, its end, and the usage if asked for."""
        generation = event.generation
        for index, candidate in enumerate(self._chosen(generation)):
            text = {**self._text(candidate.text, whole=False), "index": index}
            logprobs = self._logprobs_of(candidate)
            yield self._chunk([{**text, "finish_reason": None, "logprobs": logprobs}])
            end = {**self._text("", whole=False), **({"delta": {}} if self._chat else {})}
            yield self._chunk([{**end, "index": index, "finish_reason": candidate.finish.value}])
        if include_usage:
            chunk = self._chunk([])
            chunk["usage"] = _usage(self._chosen(generation), generation)
            chunk["specrej"] = about(generation)
            yield chunk

    def _chosen(self, generation: Generation) -> Sequence[RankedCandidate]:
        found = len(generation.candidates)
        if found < self._num_choices:
            text = (
                f"only {found} of {self._num_choices} choices were completed, the other candidates"
                " were rejected: lower specrej.alpha, or specrej.algorithm best-of-n"
            )
            raise InvalidRequest([Violation("n", text)])
        return generation.candidates[: self._num_choices]

    def _head(self, request_id: str, kind: str) -> JSON:
        prefix = "chatcmpl" if self._chat else "cmpl"
        return {
            "id": f"{prefix}-{request_id or self.request_id}",
            "object": kind or "chat.completion",
            "created": self._created,
            "model": self._model,
        }

    def _chunk(self, choices: list[JSON]) -> JSON:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head("", kind), "choices": choices}

    def _text(self, text: str, *, whole: bool) -> JSON:
        if not self._chat:
            return {"text": text}
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text}}

    def _logprobs_of(self, candidate: RankedCandidate) -> JSON | None:
        """Log-probabilities; a token is named by its id, as the core returns no token texts."""
        if not self._logprobs:
            return None
        tokens = [f"token_id:{token}" for token in candidate.token_ids]
        if not self._chat:
            values = list(candidate.logprobs)
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None}
        content: list[JSON] = [
            {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(tokens, candidate.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _usage(chosen: Sequence[RankedCandidate], generation: Generation) -> JSON:
    """Tokens of the returned choices; those of all candidates are in `specrej`."""
    prompt, completion = generation.usage.prompt_tokens, sum(c.num_tokens for c in chosen)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def about(generation: Generation) -> JSON:
    """What OpenAI's objects have no field for."""
    return {
        "request_id": generation.request_id,
        "n": generation.n,
        "scores": [candidate.score for candidate in generation.candidates],
        "generated_tokens": generation.usage.generated_tokens,
        "best_of_n_tokens_estimate": generation.usage.best_of_n_tokens_estimate,
        "cached": generation.cached,
        "degraded": generation.degraded,
        "degradations": [degradation.value for degradation in generation.degradations],
        "hurried": generation.hurried,
        "reduced": generation.reduced,
    }
