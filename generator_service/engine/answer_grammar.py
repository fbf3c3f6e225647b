"""The grammar of answers that call tools, or reason before they conform, in llguidance's Lark.

A text that ends by itself is parsed by `specrej.answer_form` as it was made here: text without any
mark, or calls whose arguments conform to the tools' parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from generator_service.engine.grammar import JSON_OPTIONS, checked_schema, converted
from specrej import contracts as c
from specrej.answer_form import CALL_MARKS

_ANY = r"(.|\n)*"
_NO_ARGUMENTS = '{"type": "object", "properties": {}, "additionalProperties": false}'


def constrained(
    prompt: c.Prompt,
    sampling: c.Sampling,
    form: c.AnswerForm,
    tokens: Mapping[str, int],
    *,
    may_repeat: bool,
) -> c.StructuredOutput | None:
    """What complete answers conform to; None: any text.

    `tokens`: special tokens among the marks, by text; `may_repeat`: whether the model's chat
    template has several calls in a turn.

    Raises:
        ValueError: a tool's parameters are not supported.
    """
    output = sampling.structured_output
    has_calls = form.tool_format and prompt.tool_choice != "none"
    if not has_calls and not (form.thinking_end and (output or sampling.max_thinking_tokens)):
        return output
    writer = _Writer(form, tokens)
    lines = writer.start(sampling.max_thinking_tokens)
    if has_calls:
        lines += writer.calls(prompt, several=may_repeat and prompt.parallel_tool_calls)
    else:
        lines += writer.output(output)
    return c.Grammar("\n".join(lines))


class _Writer:
    """Writes rules; names of rules are those of the grammar's whole."""

    def __init__(self, form: c.AnswerForm, tokens: Mapping[str, int]) -> None:
        self._form, self._tokens = form, tokens

    def start(self, max_thinking_tokens: int) -> list[str]:
        """The rules before the answer: it may reason, or does so already."""
        begin, end = self._form.thinking_begin, self._form.thinking_end
        if not end:
            return ["%llguidance {}", "start: answer"]
        reasoned = "inside SPACE? answer"
        start = reasoned if self._form.is_thinking else f"{self._mark(begin)} {reasoned} | answer"
        most = f"[max_tokens={max_thinking_tokens}]" if max_thinking_tokens else ""
        inside = (
            [f"inside: within {self._mark(end)}", f"within{most}: INSIDE"]
            if end in self._tokens
            else ["inside[lazy]: LAST"]
        )
        return [
            "%llguidance {}",
            f"start: {start}",
            r"SPACE: /[ \n]{1,2}/",
            *inside,
            f"INSIDE: /{_ANY}/ & ~/{_ANY}{_regex(end)}{_ANY}/"
            if end in self._tokens
            else f"LAST: /{_ANY}{_regex(end)}/",
        ]

    def output(self, output: c.StructuredOutput | None) -> list[str]:
        """The answer after the reasoning, of a prompt without tools."""
        match output:
            case c.JsonSchema(schema):
                return [f"answer: {_json(json.loads(checked_schema(schema)))}"]
            case c.JsonObject():
                return [f"answer: {_json({'type': 'object'})}"]
            case c.Regex(pattern):
                slashed = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", pattern)
                return ["answer: ANSWER", f"ANSWER: /{slashed}/".replace("\n", r"\n")]
            case c.Grammar(lark):
                return [f"answer: %lark {{\n{lark}\n}}"]
        return ["answer: TEXT?", self._text()]

    def calls(self, prompt: c.Prompt, *, several: bool) -> list[str]:
        """An answer that is text, or calls; with a choice, calls only."""

        def again(text: str) -> str:
            return f" ({text})*" if several else ""

        tools = [tool for tool in prompt.tools if prompt.tool_name in ("", tool.name)]
        may_be_text, kind = prompt.tool_choice == "auto", self._form.tool_format
        key = "parameters" if kind == "llama3" else "arguments"
        rules = [f"call: {_json(_call_schema(tools, key))}"]
        text = CALL_MARKS.get(kind, "")
        mark = self._mark(text)
        if kind in ("hermes", "mistral") and may_be_text:
            if text in self._tokens:
                mark = f"TEXT? {mark}"
            else:
                rules += ["lead[lazy]: LEAD", f"LEAD: /{_ANY}{_regex(text)}/{self._excluded()}"]
                mark = "lead"
        line, comma, semicolon = r'"\n"', '", "', '"; "'
        match kind:
            case "hermes":
                body = f"{line} call {line} {self._mark('</tool_call>')}"
                calls = f"{mark} {body}{again(f'{line} {self._mark(text)} {body}')}"
            case "mistral":
                rules += [f"named: {' | '.join(map(self._named, tools))}"]
                listed = f'" "? "[" call{again(f"{comma} call")} "]"'
                calls = f"{mark} ({listed} | named{again(f'{self._mark(text)} named')})"
            case "llama3":
                calls = f"{mark}? call{again(f'{semicolon} call')}"
            case _:
                calls = f"call{again(f'{line} call')}"
        if may_be_text:
            rules += [self._text(without="" if mark == "lead" else text)]
        return [f"answer: {'TEXT? | ' if may_be_text else ''}{calls}", *rules]

    def _named(self, tool: c.Tool) -> str:
        arguments = f"{self._mark('[ARGS]')}?" if "[ARGS]" in self._tokens else '"[ARGS]"?'
        return f"{json.dumps(tool.name)} {arguments} {_json(_parameters(tool))}"

    def _text(self, without: str = "") -> str:
        """A text that is read as it is: it does not begin as a call without a mark does."""
        begins = (
            rf"\s*[^{{\s]{_ANY}" if self._form.tool_format in ("json", "llama3") else r"(.|\n)+"
        )
        spelled = f" & ~/{_ANY}{_regex(without)}{_ANY}/" if without else ""
        return f"TEXT: /{begins}/{spelled}{self._excluded()}"

    def _excluded(self) -> str:
        """Excludes a text that begins as reasoning does."""
        begin = self._form.thinking_begin
        is_there = begin and not self._form.is_thinking
        return rf" & ~/\s*{_regex(begin)}{_ANY}/" if is_there else ""

    def _mark(self, text: str) -> str:
        return f"<[{self._tokens[text]}]>" if text in self._tokens else json.dumps(text)


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _parameters(tool: c.Tool) -> dict[str, Any]:
    """A tool's schema. Raises ValueError: it is not supported, or not of objects."""
    schema: dict[str, Any] = json.loads(checked_schema(tool.parameters or _NO_ARGUMENTS))
    if schema.setdefault("type", "object") != "object":
        raise ValueError(f"the parameters of {tool.name} must have the type object")
    return schema


def _call_schema(tools: list[c.Tool], key: str) -> dict[str, Any]:
    """The schema of one call, with the parameters of each tool as definitions."""
    definitions, calls = {}, []
    for number, tool in enumerate(tools):
        name = f"tool{number}"
        definitions[name] = _moved(_parameters(tool), f"#/$defs/{name}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/{name}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"$defs": definitions, "anyOf": calls}


def _moved(part: Any, root: str) -> Any:
    """A schema's part whose references begin at this root."""
    if isinstance(part, list):
        return [_moved(item, root) for item in part]
    if not isinstance(part, dict):
        return part
    moved = converted(part, _moved, root)
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
