"""Anthropic's /v1/messages: requests as chats, answers as blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from gateway import fields, images
from gateway.answers import JSON, Answer, Block, BlockAnswer
from gateway.errors import anthropic_body
from gateway.requests import Call, Request
from specrej import contracts as c
from specrej.client.options import json_text

_BUILT_IN = "there are no built-in tools"


class ContentBlock(fields.Checked):
    """A text or image, a call, the result of one, or reasoning, which has no effect."""

    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    source: Annotated[Any, AfterValidator(images.of_source)] = None
    id: str = ""
    name: str = ""
    input: fields.Object = Field(default_factory=dict)
    tool_use_id: str = ""
    content: fields.Content = ()
    is_error: bool | None = None

    ignores: ClassVar = {
        "cache_control": fields.SHARED,
        "transformations": "images are turned upright only",
        **dict.fromkeys(("caller", "toolset_name"), _BUILT_IN),
        **dict.fromkeys(("citations", "data", "signature", "thinking"), fields.OF_ANSWERS),
    }

    _complete = fields.needs(
        "type",
        text=("text",),
        image=("source",),
        tool_use=("id", "name", "input"),
        tool_result=("tool_use_id",),
    )


def _blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Turn(fields.Checked):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], BeforeValidator(_blocks)]

    def messages(self) -> Iterator[c.Message]:
        """The results of calls, then what else the turn has."""
        parts, calls, has_results = list[Any](), list[c.ToolCall](), False
        for block in self.content:
            match block.type:
                case "text":
                    parts.append(c.TextPart(block.text))
                case "image":
                    parts.append(block.source)
                case "tool_use":
                    calls.append(c.ToolCall(block.id, block.name, json_text(block.input)))
                case "tool_result":
                    # Chat templates have no field for failures.
                    error = [c.TextPart("Error: ")] if block.is_error else []
                    result = [*error, *block.content]
                    yield fields.message_of("tool", result, call_id=block.tool_use_id)
                    has_results = True
        if parts or calls or not has_results:
            yield fields.message_of(self.role, parts, calls)


class Tool(fields.Checked):
    name: str
    description: str | None = None
    input_schema: fields.Object
    type: Literal["custom"] | None = None

    ignores: ClassVar = {
        "cache_control": fields.SHARED,
        **dict.fromkeys(("allowed_callers", "defer_loading"), _BUILT_IN),
        "eager_input_streaming": "inputs are streamed anyway",
        "input_examples": "chat templates do not know them",
        "strict": "all inputs conform",
    }


class ToolChoice(fields.Checked):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None

    _complete = fields.needs("type", tool=("name",))


class Thinking(fields.Checked):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1)] = None

    ignores: ClassVar = {"display": "reasoning is returned whole"}


class MessagesRequest(Request):
    """The fields of /v1/messages."""

    max_tokens: Annotated[int, fields.Maps("sampling.max_tokens"), Field(ge=1)]
    messages: Annotated[list[Turn], fields.Maps("prompt.messages"), Field(min_length=1)]
    system: Annotated[fields.Content, fields.Maps("prompt.messages")] = ()
    stop_sequences: Annotated[list[str] | None, fields.Maps("sampling.stop")] = None
    top_k: Annotated[int | None, fields.Maps("sampling.top_k")] = None
    tools: Annotated[list[Tool] | None, fields.Maps("prompt.tools")] = None
    tool_choice: Annotated[ToolChoice | None, fields.Maps("prompt.tool_choice")] = None
    thinking: Annotated[Thinking | None, fields.Maps("prompt.thinking")] = None
    output_config: fields.Output = None

    container: Annotated[Any, fields.Refused("is not supported: there are no containers")] = None

    ignores: ClassVar = {
        "cache_control": fields.SHARED,
        "metadata": "the token identifies the tenant",
        **dict.fromkeys(("diagnostics", "inference_geo", "service_tier", "speed"), fields.HOSTING),
        **dict.fromkeys(("user_profile_id", "workspace_id"), fields.HOSTING),
    }

    def turns(self) -> list[tuple[str, c.Message]]:
        """The conversation, which begins with the system's text."""
        turns = [("system", fields.message_of("system", self.system))] if self.system else []
        for number, turn in enumerate(self.messages):
            turns += [(f"messages[{number}]", message) for message in turn.messages()]
        return turns

    def options(self) -> list[tuple[str, str, Any]]:
        bound = self.thinking.budget_tokens if self.thinking else None
        return [*super().options(), ("thinking.budget_tokens", _BUDGET, bound)]

    def made_prompt(self) -> c.Prompt:
        """The conversation; a last turn of the assistant is the beginning of the answer."""
        thinking = {"enabled": True, "disabled": False}
        prompt = c.Prompt(
            tuple(turn for _, turn in self.turns()),
            continue_final=self.messages[-1].role == "assistant",
            thinking=thinking.get(self.thinking.type) if self.thinking else None,
        )
        tools = [
            c.Tool(tool.name, tool.description or "", json_text(tool.input_schema))
            for tool in self.tools or ()
        ]
        given = self.tool_choice or ToolChoice(type="auto")
        choice = fields.Choice(_CHOICES[given.type], given.name if given.type == "tool" else "")
        return fields.with_tools(prompt, tools, choice, not given.disable_parallel_tool_use)

    def paths(self) -> dict[str, str]:
        schema = "sampling.structured_output.json_schema"
        return {**super().paths(), schema: "output_config.format", "prompt": "messages"}

    def answer(self, call: Call) -> Answer:
        return MessagesAnswer(self.model, stop_at=call.options.get("stop_at"))


_BUDGET = "sampling.max_thinking_tokens"
_CHOICES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none", "auto": "auto", "any": "required", "tool": "required"
}  # fmt: skip


class MessagesAnswer(BlockAnswer):
    """A message, or its events."""

    def opening(self) -> Iterator[JSON]:
        yield {"type": "message_start", "message": self._message([], None, (0, 0))}

    def headers(self, generation: c.Generation) -> dict[str, str]:
        """As of the base class, with the name that Anthropic's clients read."""
        return {**super().headers(generation), "request-id": generation.request_id}

    def failure(self, status: int, body: JSON) -> JSON:
        return anthropic_body(status, body)

    def _begun(self, index: int, block: Block) -> Iterator[JSON]:
        yield {"type": "content_block_start", "index": index, "content_block": _block(block)}

    def _grown(self, index: int, block: Block, text: str) -> Iterator[JSON]:
        kind, field = _DELTAS[block.kind]
        delta = {"type": kind, field: text}
        yield {"type": "content_block_delta", "index": index, "delta": delta}

    def _ended(self, index: int, block: Block) -> Iterator[JSON]:
        yield {"type": "content_block_stop", "index": index}

    def _closed(self, candidate: c.RankedCandidate) -> Iterator[JSON]:
        whole = self._whole(candidate)
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        delta |= {"stop_details": None, "container": None}
        end = {"type": "message_delta", "delta": delta, "usage": whole["usage"]}
        yield {**end, **self._about()}
        yield {"type": "message_stop"}

    def _whole(self, candidate: c.RankedCandidate) -> JSON:
        has_calls = any(block.kind == "call" for block in self._blocks)
        ended = "stop_sequence" if candidate.stop_text else "end_turn"
        ended = "tool_use" if has_calls else ended
        reason = ended if candidate.finish is c.FinishReason.STOP else "max_tokens"
        content = [_block(block) for block in self._blocks]
        whole = self._message(content, reason, self._num_tokens())
        return {**whole, "stop_sequence": candidate.stop_text or None, **self._about()}

    def _message(self, content: list[JSON], reason: str | None, tokens: tuple[int, int]) -> JSON:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {"input_tokens": tokens[0], "output_tokens": tokens[1]},
        }


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _block(block: Block) -> JSON:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "text":
            return {"type": "text", "text": block.text}
        case "call":
            use = {"type": "tool_use", "id": block.id, "name": block.name}
            return {**use, "input": _object(block.text)}


def _object(arguments: str) -> Any:
    """The arguments of a call; none of a call that the end of the tokens has cut."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}
