"""Tools and calls as chat templates take them, and as text where they do not. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from specrej.answer_form import written
from specrej.contracts import AnswerForm, Message, Prompt, TextPart, Tool, ToolCall

JSON_CALLS = AnswerForm("json")
_NO_PARAMETERS = '{"type": "object", "properties": {}}'
_EXAMPLE = ToolCall("", "NAME", '{"ARGUMENT": "VALUE"}')


def function_of(tool: Tool) -> dict[str, Any]:
    """A tool as templates take it."""
    parameters = json.loads(tool.parameters or _NO_PARAMETERS)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def chat_message(turn: Message) -> dict[str, Any]:
    """A turn as in OpenAI's API."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.chat_content}
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in turn.tool_calls
        ]
    return message | ({"tool_call_id": turn.tool_call_id} if turn.role == "tool" else {})


def call_fields(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """What templates take of each turn beside its role and content: calls with their arguments as
    objects, and names of results. Ids are of nine letters and digits, as Mistral's templates
    require."""
    ids: dict[str, tuple[str, str]] = {}  # the latest call of each id: a new id, and the tool
    listed: list[dict[str, Any]] = []
    count = 0
    for turn in turns:
        calls = []
        for call in turn.tool_calls:
            count += 1
            ids[call.id] = f"call{count:05d}", call.name
            function = {"name": call.name, "arguments": json.loads(call.arguments)}
            calls.append({"id": ids[call.id][0], "type": "function", "function": function})
        fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if turn.role == "tool":
            new_id, name = ids.get(turn.tool_call_id, ("call00000", ""))
            fields |= {"tool_call_id": new_id} | ({"name": name} if name else {})
        listed.append(fields)
    return listed


def as_text(turns: Sequence[Message], form: AnswerForm) -> list[Message]:
    """Turns without calls: they are text as the model would write it, and results are the user's,
    in one turn with what follows them."""
    names: dict[str, str] = {}
    plain: list[Message] = []
    after_result = False
    for turn in turns:
        names |= {call.id: call.name for call in turn.tool_calls}
        if turn.tool_calls:
            parts = filter(None, (turn.text, written(turn.tool_calls, form)))
            turn = Message(turn.role, "\n".join(parts))
        is_result = turn.role == "tool"
        if is_result:
            name = names.get(turn.tool_call_id, turn.tool_call_id)
            turn = Message("user", f"Result of {name}: {turn.text}")
        if after_result and turn.role == "user" and not turn.images:
            turn = Message("user", f"{plain.pop().text}\n{turn.text}")
        plain.append(turn)
        after_result = turn.role == "user" and (is_result or after_result)
    return plain


def with_tools(
    turns: Sequence[Message], tools: Sequence[Tool], form: AnswerForm, *, takes_system: bool
) -> list[Message]:
    """Turns of which the first describes the tools: the system's, or else the user's."""
    functions = [json.dumps(function_of(t)["function"], ensure_ascii=False) for t in tools]
    text = (
        "You can call functions. To call one, answer with the call alone, in this form:\n"
        f"{written([_EXAMPLE], form)}\n"
        "These are the functions, with JSON Schemas of their arguments:\n" + "\n".join(functions)
    )
    first, *others = turns
    if first.role == "system":
        return [Message("system", f"{first.text}\n\n{text}"), *others]
    if takes_system:
        return [Message("system", text), *turns]
    if first.parts:
        return [replace(first, parts=(TextPart(f"{text}\n\n"), *first.parts)), *others]
    return [replace(first, content=f"{text}\n\n{first.text}"), *others]


def marked(prompt: Prompt, mark: Callable[[str], str]) -> Prompt:
    """The prompt with `mark` applied to each text of the caller, in JSON to each string."""

    def of_turn(turn: Message) -> Message:
        calls = tuple(
            ToolCall(mark(call.id), mark(call.name), _marked_json(call.arguments, mark))
            for call in turn.tool_calls
        )
        turn = turn.with_texts(mark)
        return replace(turn, tool_calls=calls, tool_call_id=mark(turn.tool_call_id))

    tools = tuple(
        Tool(mark(tool.name), mark(tool.description), _marked_json(tool.parameters, mark))
        for tool in prompt.tools
    )
    return replace(prompt, messages=tuple(map(of_turn, prompt.messages)), tools=tools)


def _marked_json(text: str, mark: Callable[[str], str]) -> str:
    if not text:
        return text
    value = json.loads(text)
    other = _marked_value(value, mark)
    return text if other == value else json.dumps(other, ensure_ascii=False)


def _marked_value(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, list):
        return [_marked_value(item, mark) for item in value]
    if isinstance(value, dict):
        return {mark(name): _marked_value(item, mark) for name, item in value.items()}
    return value
