"""Scores of given answers, in the forms of vLLM's /v1/score and Cohere's and Jina's /v1/rerank.

`data`, `messages` and `unfinished` are extensions; other fields of those servers have no effect.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field

from gateway.answers import JSON
from gateway.fields import Checked, as_texts
from gateway.requests import ChatMessage
from specrej.client.options import json_text
from specrej.contracts import Prompt, Scores
from specrej.contracts.errors import InvalidRequest, Violation

_MAX_PAIRS = 16  # prompts of a request, each of which is a call

_Data = Annotated[str, BeforeValidator(lambda value: "" if value is None else json_text(value))]
Call = tuple[Prompt, Sequence[str]]


class Scoring(Checked):
    """What both routes have. `model`: the reward's name; absent or empty: the default."""

    model: str | None = None
    data: _Data = ""
    unfinished: bool | None = None
    timeout_s: Annotated[float | None, Field(gt=0)] = None

    _fields: ClassVar[Mapping[str, str]]  # by the first names of the orchestrator's paths

    def name_of(self, path: str) -> str:
        """The caller's field for a path of the orchestrator; a prompt is one text."""
        name = re.split(r"[.\[]", path, maxsplit=1)[0]
        return self._fields.get(name, name) + ("" if name == "prompt" else path[len(name) :])

    def _about(self, results: Sequence[Scores]) -> JSON:
        tokens = sum(scores.computed_tokens for scores in results)
        return {
            "model": results[0].reward,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }


def _texts_of(*names: str) -> Any:
    """Texts under one of these names; errors have the first."""
    texts_or_none = Annotated[list[str] | None, BeforeValidator(as_texts)]
    return Annotated[texts_or_none, Field(validation_alias=AliasChoices(*names))]


class ScoreRequest(Scoring):
    """One prompt and its answers, or as many prompts as answers; or a conversation."""

    _fields: ClassVar = {"prompt": "text_1", "responses": "text_2", "reward": "model"}

    text_1: _texts_of("text_1", "queries", "data_1") = None  # type: ignore[valid-type]
    text_2: _texts_of("text_2", "documents", "items", "data_2") = None  # type: ignore[valid-type]
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1)] = None

    def name_of(self, path: str) -> str:
        """As of the base class; `messages` have their own paths."""
        name = re.sub(r"^prompt(\.messages)?\b", "messages", path) if self.messages else path
        return super().name_of(name.replace("].parts", "].content", 1))

    def calls(self) -> list[Call]:
        """Each prompt with its answers.

        Raises:
            InvalidRequest: a number of prompts that does not fit.
        """
        answers = self.text_2 or []
        if bool(self.messages) == bool(self.text_1):
            raise InvalidRequest([Violation("text_1", "one of text_1 and messages is needed")])
        if not answers:
            raise InvalidRequest([Violation("text_2", "must have 1 or more texts")])
        if self.messages:
            turns = tuple(message.turn for message in self.messages)
            return [(Prompt(messages=turns), answers)]
        prompts = [Prompt.from_user(text) for text in self.text_1]
        if len(prompts) == 1:
            return [(prompts[0], answers)]
        if len(prompts) != len(answers) or len(prompts) > _MAX_PAIRS:
            text = f"must be one text, or as many as text_2, at most {_MAX_PAIRS}"
            raise InvalidRequest([Violation("text_1", text)])
        return [(prompt, [answer]) for prompt, answer in zip(prompts, answers, strict=True)]

    def reply(self, results: Sequence[Scores]) -> JSON:
        """The scores of all answers, in order."""
        values = [value for scores in results for value in scores.values]
        data = [{"index": n, "object": "score", "score": value} for n, value in enumerate(values)]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return {**head, **self._about(results), "data": data}


def _document(value: object) -> object:
    """The text of a document, which Cohere and Jina accept as an object, too."""
    return value.get("text") if isinstance(value, dict) else value


class RerankRequest(Scoring):
    """A prompt and its answers, of which the best `top_n` are returned; absent or 0: all."""

    _fields: ClassVar = {"prompt": "query", "responses": "documents", "reward": "model"}

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[Annotated[str, BeforeValidator(_document)]], Field(min_length=1)]
    top_n: Annotated[int | None, Field(ge=0)] = None
    return_documents: bool | None = None

    def calls(self) -> list[Call]:
        return [(Prompt.from_user(self.query), self.documents)]

    def reply(self, results: Sequence[Scores]) -> JSON:
        """The answers by descending score; equal ones in their order."""
        ranked = [*self._ranked(results[0].values)][: self.top_n or None]
        return {"id": f"rerank-{uuid.uuid4().hex}", **self._about(results), "results": ranked}

    def _ranked(self, values: Sequence[float]) -> Iterator[JSON]:
        for index in sorted(range(len(values)), key=lambda index: -values[index]):
            result: JSON = {"index": index, "relevance_score": values[index]}
            if self.return_documents is not False:
                result["document"] = {"text": self.documents[index]}
            yield result
