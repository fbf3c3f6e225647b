"""OpenAI's /v1/responses: requests as chats, answers as items. No response is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gateway import fields
from gateway.answers import JSON, Answer, Block, BlockAnswer, reasoning_tokens
from gateway.requests import Call, Request
from specrej.client.options import json_text
from specrej.contracts import FinishReason, Message, Prompt, RankedCandidate, TextPart, ToolCall

_STATE = "is not supported: responses are not stored, so send all items"
_BUILT_IN = "there are no built-in tools"


def _items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Item(fields.Checked):
    """A message, a call, or the result of one."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(fields.role_of)] = (
        "user"
    )
    content: fields.Content = ()
    call_id: str = ""
    name: str = ""
    arguments: Annotated[str, BeforeValidator(lambda value: value or "{}")] = "{}"
    output: fields.Content = ()

    ignores: ClassVar = {
        **dict.fromkeys(("id", "status", "phase"), "items are known by their order"),
        **dict.fromkeys(("summary", "encrypted_content"), "reasoning is not repeated"),
        **dict.fromkeys(("caller", "namespace", "async"), _BUILT_IN),
    }

    _complete = fields.needs(
        "type",
        message=("role", "content"),
        function_call=("call_id", "name"),
        function_call_output=("call_id", "output"),
    )


class ResponseTool(fields.Function):
    """A tool, which the response repeats with all of its fields."""

    type: Literal["function"]

    ignores: ClassVar = {
        **fields.Function.ignores,
        **dict.fromkeys(("allowed_callers", "async", "defer_loading", "output_schema"), _BUILT_IN),
    }

    @model_validator(mode="after")
    def _is_json(self) -> Self:
        json_text(self.model_dump())
        return self


class Reasoning(fields.Checked):
    effort: Annotated[Any, fields.Maps("prompt.thinking"), AfterValidator(fields.effort_of)] = None

    ignores: ClassVar = {
        **dict.fromkeys(("context", "mode"), fields.NO_SETTING),
        **dict.fromkeys(("generate_summary", "summary"), "reasoning is returned whole"),
    }


class ResponsesRequest(Request):
    """The fields of /v1/responses."""

    input: Annotated[
        list[Item], fields.Maps("prompt.messages"), Field(min_length=1), BeforeValidator(_items)
    ]
    instructions: Annotated[str | None, fields.Maps("prompt.messages")] = None
    max_output_tokens: Annotated[int | None, fields.Maps("sampling.max_tokens"), Field(ge=1)] = None
    text: fields.Output = None
    tools: Annotated[list[ResponseTool] | None, fields.Maps("prompt.tools")] = None
    tool_choice: fields.ToolChoice = None
    parallel_tool_calls: Annotated[bool | None, fields.Maps("prompt.parallel_tool_calls")] = None
    reasoning: Annotated[Reasoning | None, fields.Maps("prompt.thinking")] = None
    stream_options: Annotated[fields.StreamOptions | None, fields.Maps("stream")] = None

    background: Annotated[Any, fields.Refused(_STATE, (False,))] = None
    context_management: Annotated[Any, fields.Refused("is not supported: items are not cut")] = None
    conversation: Annotated[Any, fields.Refused(_STATE)] = None
    image: Annotated[Any, fields.Refused("is not supported: no images are made")] = None
    moderation: Annotated[Any, fields.Refused("is not supported: answers are not moderated")] = None
    previous_response_id: Annotated[Any, fields.Refused(_STATE)] = None
    prompt: Annotated[Any, fields.Refused("is not supported: there are no stored templates")] = None
    top_logprobs: Annotated[Any, fields.Refused("is not supported here: use chats", (0,))] = None
    truncation: Annotated[
        Any, fields.Refused("is not supported: items are not cut", ("disabled",))
    ] = None

    ignores: ClassVar = {
        **fields.OF_OPENAI,
        **dict.fromkeys(("access_programs", "background_options"), fields.HOSTING),
        "include": "answers have all that there is",
        "max_tool_calls": _BUILT_IN,
    }

    def turns(self) -> list[tuple[str, Message]]:
        """The conversation; calls belong to the assistant's turn before them."""
        drafts: list[tuple[str, str, Any, list[ToolCall], str]] = []
        if self.instructions:
            drafts.append(("instructions", "system", [TextPart(self.instructions)], [], ""))
        for number, item in enumerate(self.input):
            field = f"input[{number}]"
            if item.type == "message":
                drafts.append((field, item.role, item.content, [], ""))
            elif item.type == "function_call_output":
                drafts.append((field, "tool", item.output, [], item.call_id))
            elif item.type == "function_call":
                if not drafts or drafts[-1][1] != "assistant":
                    drafts.append((field, "assistant", (), [], ""))
                drafts[-1][3].append(ToolCall(item.call_id, item.name, item.arguments))
        return [(draft[0], fields.message_of(*draft[1:])) for draft in drafts]

    def made_prompt(self) -> Prompt:
        turns = tuple(turn for _, turn in self.turns())
        prompt = Prompt(turns, thinking=self.reasoning.effort if self.reasoning else None)
        tools = [tool.tool for tool in self.tools or ()]
        return fields.with_tools(prompt, tools, self.tool_choice, self.parallel_tool_calls)

    def paths(self) -> dict[str, str]:
        schema = "sampling.structured_output.json_schema"
        return {**super().paths(), schema: "text.format", "prompt": "input"}

    def answer(self, call: Call) -> Answer:
        return ResponsesAnswer(self, call)


class ResponsesAnswer(BlockAnswer):
    """A response, or its events."""

    def __init__(self, request: ResponsesRequest, call: Call) -> None:
        super().__init__(request.model, stop_at=call.options.get("stop_at"))
        self._echo = {
            "parallel_tool_calls": call.prompt.parallel_tool_calls,
            "tool_choice": call.prompt.tool_choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools or ()],
        }
        self._num_events = 0

    def opening(self) -> Iterator[JSON]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def failure(self, status: int, body: JSON) -> JSON:
        return self._event("error", **body, **body["error"] | {"type": "error"})

    def _begun(self, index: int, block: Block) -> Iterator[JSON]:
        item = self._item(index, block, "in_progress")
        yield self._event("response.output_item.added", output_index=index, item=item)
        if block.kind != "call":
            yield self._part_event("content_part.added", index, block, part=_part(block))

    def _grown(self, index: int, block: Block, text: str) -> Iterator[JSON]:
        yield self._part_event(f"{_NAMES[block.kind]}.delta", index, block, delta=text)

    def _ended(self, index: int, block: Block) -> Iterator[JSON]:
        field = {"arguments": block.text, "name": block.name}
        whole = field if block.kind == "call" else {"text": block.text}
        yield self._part_event(f"{_NAMES[block.kind]}.done", index, block, **whole)
        if block.kind != "call":
            yield self._part_event("content_part.done", index, block, part=_part(block))
        item = self._item(index, block, "completed")
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _closed(self, candidate: RankedCandidate) -> Iterator[JSON]:
        response = self._whole(candidate)
        yield self._event(f"response.{response['status']}", response=response)

    def _whole(self, candidate: RankedCandidate) -> JSON:
        is_whole = candidate.finish is FinishReason.STOP
        output = [self._item(n, block, "completed") for n, block in enumerate(self._blocks)]
        prompt, completion = self._num_tokens()
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(candidate)},
            "total_tokens": prompt + completion,
        }
        details = None if is_whole else {"reason": "max_output_tokens"}
        response = self._response("completed" if is_whole else "incomplete")
        changes = {"output": output, "usage": usage, "incomplete_details": details}
        return {**response, **changes, **self._about()}

    def _response(self, status: str) -> JSON:
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            **self._echo,
        }

    def _event(self, kind: str, **more: Any) -> JSON:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **more}

    def _part_event(self, kind: str, index: int, block: Block, **more: Any) -> JSON:
        place: JSON = {"item_id": self._id(index, block), "output_index": index}
        if block.kind != "call":
            place["content_index"] = 0
        if block.kind == "text" and "part" not in more:
            place["logprobs"] = []
        return self._event(f"response.{kind}", **place, **more)

    def _id(self, index: int, block: Block) -> str:
        return f"{_IDS[block.kind]}_{self.request_id}_{index}"

    def _item(self, index: int, block: Block, status: str) -> JSON:
        item: JSON = {"id": self._id(index, block), "status": status}
        content = [] if status == "in_progress" else [_part(block)]
        match block.kind:
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case "call":
                call = {"call_id": block.id, "name": block.name, "arguments": block.text}
                return {**item, "type": "function_call", **call}


_NAMES = {
    "reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"
}  # fmt: skip
_IDS = {"reasoning": "rs", "text": "msg", "call": "fc"}


def _part(block: Block) -> JSON:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
