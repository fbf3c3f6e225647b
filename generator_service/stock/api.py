"""OpenAI's API in the forms of several servers: requests of tokens, and the parts of answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from generator_service.engine.commands import Top
from generator_service.engine.grammar import checked_schema
from generator_service.engine.sampling import LEAST_LOGPROB
from generator_service.stock.requests import Ask, Part, continues_exactly, structured_fields
from generator_service.stock.server import encodable, reading
from specrej import contracts as c
from specrej.contracts.requests import MAX_INT32
from specrej_models.tools import JSON_CALLS, as_text, chat_message, function_of, with_tools

# Servers whose own defaults, or those of the model's files, differ from ours, and their names of
# fields beyond OpenAI's.
KNOWN = ("vllm", "sglang", "llamacpp")
_CANCEL_ALL = ("vllm", "sglang")  # when the connection closes, streams or not
# Tokens behind a round's last one with which a character of four bytes may end.
HIDDEN_TOKENS = 3
_PENALTIES = {name: name for name in ("presence_penalty", "frequency_penalty")}
_MORE_NAMES = {name: name for name in ("top_k", "min_p", "repetition_penalty")}
_LLAMA_NAMES = {**_MORE_NAMES, "repetition_penalty": "repeat_penalty"}
_LLAMA_WINDOW = 131_072  # tokens that its penalties look back on
_WITH_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_THINKING = ("<think>", "</think>")
TEXT_CALLS = c.AnswerForm("hermes", *_THINKING)
_CHAT = c.AnswerForm("", *_THINKING)
_ROUNDING = 1e-3  # of a log-probability near 0, which may be above it


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server can do.

    `kind`: "vllm", "llamacpp", or what its list of models says. `ids`: it takes token ids and
    returns them. `least_logprobs`: to be requested; None: it has none. `structured`: the field for
    structured outputs, or empty. `grammars`: those of llguidance are among them. `images`, `tools`:
    chats may have them.
    """

    kind: str = ""
    version: str = ""
    context_tokens: int = 0
    ids: bool = False
    streams: bool = False
    seeds: bool = False
    least_logprobs: int | None = None
    structured: str = ""
    images: bool = False
    grammars: bool = False
    tools: bool = False

    @property
    def hides_tokens(self) -> bool:
        """Whether a stream has a character of several tokens with the last one's id, once it is
        whole: as llama.cpp's."""
        return self.kind == "llamacpp" and self.ids

    @property
    def form(self) -> c.CandidateForm:
        if self.ids:
            return c.CandidateForm.ROUNDS
        return c.CandidateForm.STREAMS if self.streams else c.CandidateForm.WHOLE_ANSWERS

    @property
    def names(self) -> tuple[str, ...]:
        """For people."""
        found = {
            "token ids": self.ids,
            "streams": self.streams,
            "seeds": self.seeds,
            "log-probabilities": self.least_logprobs is not None,
            f"structured outputs ({self.structured})": self.structured,
            "grammars": self.grammars,
            "tools": self.tools,
        }
        return tuple(name for name, is_there in found.items() if is_there)


def with_hidden(message: Any, ids_of: Callable[[int, bytes], list[int]]) -> Any:
    """The message with all tokens of its characters; their log-probabilities are the last one's.

    Raises:
        InternalError: as `part_of`.
    """
    with reading():
        for choice in message["choices"]:
            if content := (choice.get("logprobs") or {}).get("content"):
                choice["logprobs"]["content"] = [
                    {**one, "id": token_id}
                    for one in content
                    for token_id in ids_of(_count(one["id"]), bytes(one.get("bytes") or ()))
                ]
    return message


def request_of(ask: Ask, model: str, able: Abilities) -> tuple[str, dict[str, Any]]:
    """Path and body."""
    sampling, more = ask.command.sampling, HIDDEN_TOKENS if able.hides_tokens else 0
    body: dict[str, Any] = {"model": model, "max_tokens": ask.count + more, "seed": ask.seed}
    body |= _sampling_fields(sampling, able)
    if ask.min_tokens:
        body["min_tokens"] = min(ask.min_tokens, ask.count)
    # llama.cpp's server, for one, goes on with a request that is not a stream after its caller has
    # left.
    if able.streams and (ask.interval == 1 or able.kind not in _CANCEL_ALL):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if sampling.structured_output:
        body |= structured_field(sampling.structured_output, able.structured)
    if able.kind == "vllm" and ask.command.cache_salt:
        body["cache_salt"] = ask.command.cache_salt
    path, fields = _prompt_fields(ask, able)
    return path, body | fields


def _prompt_fields(ask: Ask, able: Abilities) -> tuple[str, dict[str, Any]]:
    """The path, and the fields that depend on the form of the prompt."""
    sampling, prompt, least = ask.command.sampling, ask.prompt, able.least_logprobs
    if able.ids and ask.command.prompt_ids:
        ids = [*ask.command.prompt_ids, *ask.token_ids]
        logprobs = max(least or 0, sampling.top_logprobs)
        return "/completions", {"prompt": ids, "logprobs": logprobs, **_WITH_IDS}
    # Of tokens, they are found here.
    ends = () if able.ids else sampling.stop
    fields: dict[str, Any] = {"stop": list(ends)} if ends else {}
    if prompt.text:
        fields |= {} if least is None else {"logprobs": least}
        return "/completions", {**fields, "prompt": prompt.text}
    fields |= {} if least is None else {"logprobs": True}
    if able.ids:
        most = max(least or 0, sampling.top_logprobs)
        fields |= {"top_logprobs": most, **_WITH_IDS}
    if prompt.continue_final:  # as vLLM's API has it
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if able.tools and prompt.tools:
        fields |= tools_of(prompt)
    turns = prompt.messages if able.tools else _without_tools(prompt)
    return "/chat/completions", {**fields, "messages": [chat_message(turn) for turn in turns]}


def answer_form(prompt: c.Prompt, able: Abilities) -> c.AnswerForm:
    """How `PartsAsText` writes the answers of chats; servers without tools are asked for JSON."""
    if not prompt.tools:
        return c.PLAIN if prompt.text else _CHAT
    return TEXT_CALLS if able.tools else replace(_CHAT, tool_format=JSON_CALLS.tool_format)


def tools_of(prompt: c.Prompt) -> dict[str, Any]:
    """The fields of a chat with tools."""
    choice: Any = prompt.tool_choice
    if prompt.tool_name:
        choice = {"type": "function", "function": {"name": prompt.tool_name}}
    return {
        "tools": [function_of(tool) for tool in prompt.tools],
        "tool_choice": choice,
        "parallel_tool_calls": prompt.parallel_tool_calls,
    }


def _without_tools(prompt: c.Prompt) -> list[c.Message]:
    turns = as_text(prompt.messages, JSON_CALLS)
    if not prompt.tools:
        return turns
    return with_tools(turns, prompt.tools, JSON_CALLS, takes_system=False)  # that is unknown


def _sampling_fields(sampling: c.Sampling, able: Abilities) -> dict[str, Any]:
    """Fields of the body by the server's names. Servers that read defaults from the model receive
    all, others only those of OpenAI's and what differs from the defaults."""
    is_llama, default = able.kind == "llamacpp", c.Sampling()
    more = _LLAMA_NAMES if is_llama else _MORE_NAMES
    body = {name: getattr(sampling, name) for name in ("temperature", "top_p")}
    for name, theirs in {**_PENALTIES, **more}.items():
        value = getattr(sampling, name)
        if value != getattr(default, name) or (able.kind in KNOWN and name in more):
            body[theirs] = value
    if "top_k" in body and not is_llama:  # SGLang, and vLLM before 0.9, refuse 0
        body["top_k"] = body["top_k"] or -1
    if is_llama and (sampling.repetition_penalty != 1 or not continues_exactly(sampling)):
        body["repeat_last_n"] = _LLAMA_WINDOW
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.logit_bias:
        body["logit_bias"] = {str(one.token_id): one.bias for one in sampling.logit_bias}
    if sampling.stop_token_ids and not is_llama:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    return body


def structured_field(output: c.StructuredOutput, name: str) -> dict[str, Any]:
    """The field of the body for a structured output, by the name of `Abilities.structured`."""
    if name == "structured_outputs":
        return {name: structured_fields(output)}
    assert isinstance(output, c.JsonObject | c.JsonSchema)
    if name == "json_schema":  # llama.cpp's, which reads patterns of x-guidance as texts
        schema = output.schema if isinstance(output, c.JsonSchema) else '{"type": "object"}'
        return {name: json.loads(checked_schema(schema))}
    if isinstance(output, c.JsonObject):
        return {name: {"type": "json_object"}}
    described = {"name": "answer", "schema": json.loads(output.schema), "strict": True}
    return {name: {"type": "json_schema", "json_schema": described}}


class PartsAsText:
    """The text of an answer whose reasoning and calls the server has parsed: they are written again
    as `TEXT_CALLS` has them. Its messages go in once, in order."""

    def __init__(self) -> None:
        self._index, self._has_arguments = -1, False  # of the call that is written
        self._is_thinking = False

    def __call__(self, choice: Mapping[str, Any]) -> str:
        """The text of a message's choice."""
        content, message = _text(choice), choice.get("message") or choice.get("delta") or {}
        calls = message.get("tool_calls") or ()
        # llama.cpp, SGLang and DeepSeek have the longer name, vLLM the other one.
        text = str(message.get("reasoning_content") or message.get("reasoning") or "")
        if text and not self._is_thinking:
            text, self._is_thinking = _THINKING[0] + text, True
        if self._is_thinking and (content or calls or choice.get("finish_reason") == "stop"):
            text, self._is_thinking = text + _THINKING[1], False
        # Text behind calls, as vLLM's parser for LFM2 streams it; white space may be of a call.
        text = encodable(text) + (self._close() if content.strip() and not calls else "") + content
        for number, call in enumerate(calls):
            function, index = call["function"], _count(call.get("index", number))
            if index != self._index:
                text += self._close()
                name = json.dumps(str(function["name"]))
                text += f'\n<tool_call>\n{{"name": {name}, "arguments": '
                self._index, self._has_arguments = index, False
            arguments = str(function.get("arguments") or "")
            self._has_arguments |= bool(arguments)
            text += encodable(arguments)
        return text + (self._close() if choice.get("finish_reason") else "")

    def _close(self) -> str:
        if self._index < 0:
            return ""
        self._index = -1
        return ("" if self._has_arguments else "{}") + "}\n</tool_call>"


def part_of(
    message: Any,
    made: int,
    most: int,
    *,
    has_ids: bool,
    left: int = 1024,
    text_of_choice: Callable[[Mapping[str, Any]], str] | None = None,
) -> Part:
    """The part in a message of one of the API's forms: of chats or not, whole or of a stream.

    `made`: tokens that the answer has already; `most`: as `top_logprobs`; `left`: tokens that it
    may still have, of more one is counted; `text_of_choice`: such as `PartsAsText`.

    Raises:
        InternalError: it has another form, or numbers that cannot be.
    """
    with reading():
        choice = message["choices"][0] if message["choices"] else {}
        usage = message.get("usage") or {}
        ids, logprobs, top = _tokens(choice.get("logprobs") or {}, most if has_ids else 0)
        text = ""
        if has_ids:
            ids = ids or [_count(one) for one in choice.get("token_ids") or ()]
        else:
            text, delta = (text_of_choice or _text)(choice), choice.get("delta", choice) or {}
            is_whole = "message" in choice or (choice.get("finish_reason") and usage and not made)
            is_said = text and any(delta.values())  # else it ends a call or reasoning
            counted = usage["completion_tokens"] if is_whole and not logprobs else bool(is_said)
            logprobs = logprobs or [0.0] * min(_count(counted), left + 1)
            ids = [*range(made, made + len(logprobs))]
        if len(logprobs) != len(ids) or len(top) != (len(ids) if most and has_ids else 0):
            raise ValueError("tokens and log-probabilities must be equally many")
        if any(len(values) != most for _, values in top):
            raise ValueError(f"there must be {most} most probable tokens")
        finish = choice.get("finish_reason")
        # A filtered answer is not complete.
        is_complete = finish in ("stop", "tool_calls")
        reason = c.FinishReason.STOP if is_complete else c.FinishReason.LENGTH
        part = Part(ids, logprobs, top, text, reason if finish else None)
        if usage:
            part.prompt_tokens = _count(usage["prompt_tokens"])
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            if cached is not None:
                part.cached_tokens = min(part.prompt_tokens, _count(cached))
        return part


def text_of(message: Any) -> str:
    """The text in a message. Raises InternalError: as `part_of`."""
    with reading():
        return _text(message["choices"][0])


def _tokens(given: Mapping[str, Any], most: int) -> tuple[list[int], list[float], list[Top]]:
    """Ids, if `given` has them, log-probabilities, and the most probable tokens of each step."""
    if content := given.get("content"):  # of chats, and of llama.cpp
        ids = [_count(one["id"]) for one in content if "id" in one]
        steps = [[(_id(t), t["logprob"]) for t in one["top_logprobs"]] for one in content if most]
        return ids, [_logprob(one["logprob"]) for one in content], [_top(s, most) for s in steps]
    logprobs = [_logprob(one) for one in given.get("token_logprobs") or ()]
    named = given.get("top_logprobs") or () if most else ()
    pairs = [[(name.rpartition(":")[2], value) for name, value in one.items()] for one in named]
    return [], logprobs, [_top(step, most) for step in pairs]


def _id(token: Mapping[str, Any]) -> Any:
    """llama.cpp has ids, and vLLM texts such as "token_id:5"."""
    return token["id"] if "id" in token else str(token["token"]).rpartition(":")[2]


def _top(step: list[tuple[Any, Any]], most: int) -> Top:
    """The most probable tokens, best first: vLLM has the drawn one before them."""
    best = sorted(((_logprob(value), _count(name)) for name, value in step), reverse=True)[:most]
    return [number for _, number in best], [max(value, LEAST_LOGPROB) for value, _ in best]


def _logprob(value: Any) -> float:
    logprob = float(value)
    if not (math.isfinite(logprob) and logprob < _ROUNDING):
        raise ValueError("log-probabilities must be finite and at most 0")
    return min(0.0, logprob)


def _count(value: Any) -> int:
    count = int(value)
    if not 0 <= count <= MAX_INT32:
        raise ValueError("counts and ids of tokens must be from 0 to 2**31 - 1")
    return count


def _text(choice: Mapping[str, Any]) -> str:
    text = choice.get("text")
    if text is None:
        text = (choice.get("message") or choice.get("delta") or {}).get("content")
    if not isinstance(text, str | None):
        raise TypeError("the text must be a string")
    return encodable(text or "")
