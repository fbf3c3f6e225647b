"""Parts of answers: a model's text, with the marks of its `AnswerForm`, to `AnswerParts` and back.

The one place that knows how models write calls and reasoning. Functions of texts; no tokenizer, and
no knowledge of tools: a call's name and arguments are not compared with what the prompt allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from specrej.contracts.requests import ToolCall
from specrej.contracts.results import AnswerParts, PartsDelta, ToolCallDelta
from specrej.contracts.sessions import PLAIN, AnswerForm

# What comes before calls; those of "json", and most of "llama3", begin the answer without a mark.
CALL_MARKS = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_AFTER_HERMES = "</tool_call>"
# All texts beside those of thinking that some tokenizers have as special tokens.
MARKS = (*CALL_MARKS.values(), _AFTER_HERMES, "[ARGS]", "[CALL_ID]")
_WITHOUT_MARK = ("json", "llama3")

_NAME = re.compile("[a-zA-Z0-9_.-]{1,64}")
# Mistral's newer form: a name, perhaps an id, and the arguments.
_NAMED = re.compile(r"([a-zA-Z0-9_.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_BEGIN = re.compile(r"[a-zA-Z0-9_.-]{1,64}(?:\[[\w\[\]]{0,90})?\s*")
_NAME_FIRST = re.compile(r'\{\s*"name"\s*:')
# Of JSON: what opens and closes values, what ends a text, and what is around members.
_OUTSIDE, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'\\.?|"', re.DOTALL)
_NEXT, _COLON = re.compile(r"[ \t\r\n]*([{,}])[ \t\r\n]*"), re.compile(r"[ \t\r\n]*:[ \t\r\n]*")


def parts_of(
    text: str, form: AnswerForm, *, complete: bool, candidate: int = 0
) -> AnswerParts | None:
    """The parts of a text; None if the form is PLAIN. Malformed calls are content.

    An end that may be the beginning of a mark or of a call is left out, unless the text is
    `complete`. `candidate`: its id, for the ids of calls.
    """
    if form == PLAIN:
        return None
    reader = PartsReader(form, candidate)
    deltas = [reader.feed(text), *([reader.end()] if complete else [])]
    calls = [call for delta in deltas for call in delta.tool_calls]
    return AnswerParts(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(ToolCall(call.id, call.name, call.arguments) for call in calls),
    )


def is_malformed(parts: AnswerParts, form: AnswerForm) -> bool:
    """Whether the content of a complete text begins a call that is none: a mark, or where calls
    have none, an object with a name."""
    mark = CALL_MARKS.get(form.tool_format, "")
    is_begun = form.tool_format in _WITHOUT_MARK and _is_named(parts.content.lstrip())
    return is_begun or bool(mark and mark in parts.content)


def answer_text(text: str, form: AnswerForm) -> str:
    """The text without its reasoning; empty while it may still reason."""
    if not form.thinking_end:
        return text
    answer = text.lstrip()
    reasons = form.is_thinking or answer.startswith(form.thinking_begin)
    if not reasons:
        return "" if form.thinking_begin.startswith(answer) else text
    return text.partition(form.thinking_end)[2].lstrip()


def written(calls: Sequence[ToolCall], form: AnswerForm) -> str:
    """Calls as a model of this form writes them."""
    key = "parameters" if form.tool_format == "llama3" else "arguments"
    texts = [f'{{"name": {json.dumps(call.name)}, "{key}": {call.arguments}}}' for call in calls]
    match form.tool_format:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n{_AFTER_HERMES}" for text in texts)
        case "llama3":
            return "; ".join(texts)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(texts)}]"
    return "\n".join(texts)


class PartsReader:
    """Reads a text part by part: all deltas together are the text's `parts_of`.

    What may be a mark is held back, as is a call until it is whole: a malformed one is content.
    White space around reasoning and before calls is in no part.
    """

    def __init__(self, form: AnswerForm, candidate: int = 0) -> None:
        self._form, self._candidate = form, candidate
        self._mark = CALL_MARKS.get(form.tool_format, "")
        self._rest = ""  # that is not read yet
        # Reads some of the rest, or changes the state; False: it needs more text.
        self._state: Callable[[bool], bool] = self._begin if form.thinking_end else self._start
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        self._space = ""  # before what comes next of the content, or of the reasoning
        self._is_stripped = bool(form.thinking_end)  # whether the space before the next text goes
        self._held = ""  # the mark and white space before the call that is read
        self._name = ""  # of a call that has it before its arguments
        self._in_list = False
        self._scanned, self._depth, self._in_string = 0, 0, False  # of the object that is read

    def feed(self, text: str) -> PartsDelta:
        """What the next part of the text adds."""
        self._rest += text
        return self._read(is_end=False)

    def end(self) -> PartsDelta:
        """What the end of a complete text adds: an unfinished call is content."""
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> PartsDelta:
        self._content, self._reasoning, self._calls = [], [], []
        while self._state(is_end):
            pass
        if is_end and not self._is_stripped and not self._num_calls:
            self._content.append(self._space)
        return PartsDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))

    def _begin(self, is_end: bool) -> bool:
        text, begin = self._rest.lstrip(), self._form.thinking_begin
        if begin and text.startswith(begin):
            self._rest, self._state = text.removeprefix(begin), self._reason
            return True
        if begin.startswith(text) and not is_end:
            return False
        self._is_stripped = self._form.is_thinking
        self._state = self._reason if self._form.is_thinking else self._start
        return True

    def _reason(self, is_end: bool) -> bool:
        before, mark, after = self._until(self._form.thinking_end, is_end)
        self._add(self._reasoning, before)
        self._rest = after
        if mark:
            self._space, self._is_stripped = "", True
            self._state = self._start
        elif is_end:
            self._is_stripped = True
        return bool(mark)

    def _start(self, is_end: bool) -> bool:
        if self._form.tool_format in _WITHOUT_MARK:
            text = self._rest.lstrip()
            if not text and not is_end:
                return False
            if text.startswith("{"):
                self._held = self._rest[: -len(text)]
                self._rest, self._state = text, self._object
                return True
        self._state = self._text
        return True

    def _text(self, is_end: bool) -> bool:
        before, mark, self._rest = self._until(self._mark, is_end)
        self._add(self._content, before)
        if mark:
            self._held, self._state = mark, self._call
        return bool(mark)

    def _call(self, is_end: bool) -> bool:
        text = self._rest.lstrip()
        if not text and not is_end:
            return False
        if text.startswith("{") and (self._in_list or self._form.tool_format != "mistral"):
            return self._open(text, self._object)
        if self._form.tool_format == "mistral" and not self._in_list:
            if text.startswith("["):
                self._in_list = True
                return self._open(text[1:], self._call)
            if named := _NAMED.match(text):
                self._name = named[1]
                return self._open(text[named.end() :], self._object)
            if _NAMED_BEGIN.fullmatch(text) and not is_end:
                return False
        return self._spoil()

    def _open(self, text: str, state: Callable[[bool], bool]) -> bool:
        """Hold what is before this end of the rest."""
        self._held += self._rest[: len(self._rest) - len(text)]
        self._rest, self._state = text, state
        return True

    def _object(self, is_end: bool) -> bool:
        end = self._end_of_object()
        if not end:
            return self._spoil(len(self._rest)) if is_end else False
        text, name = self._rest[:end], self._name
        try:
            members = {"name": json.dumps(name), "arguments": text} if name else _members(text)
            name, arguments = json.loads(members["name"]), _arguments(members)
        except (ValueError, LookupError, RecursionError):
            return self._spoil(end)
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            return self._spoil(end)
        index = self._num_calls
        # Equal requests get equal answers. The orchestrator adds the request's id to a call's.
        one = ToolCallDelta(index, f"call_{self._candidate}_{index}", name, arguments)
        self._calls.append(one)
        self._num_calls += 1
        self._space = ""
        self._rest, self._state = self._rest[end:], self._after
        self._clear()
        return True

    def _after(self, is_end: bool) -> bool:
        """After a call: another one of the same mark, or text."""
        text = self._rest.lstrip()
        closing = _AFTER_HERMES if self._form.tool_format == "hermes" else ""
        if self._form.tool_format in _WITHOUT_MARK:
            text = self._rest.lstrip("; \t\r\n")
        if not is_end and (not text or (closing.startswith(text) and text != closing)):
            return False
        self._state = self._text
        if closing:
            self._rest = text.removeprefix(closing)
        elif self._in_list:
            self._in_list = text.startswith(",")
            self._rest = text[1:] if text[:1] in ("]", ",") else text
            self._state = self._call if self._in_list else self._text
        elif text.startswith("{") and self._form.tool_format in _WITHOUT_MARK:
            self._rest, self._state = text, self._object
        elif not text:
            self._rest = ""
        return True

    def _spoil(self, size: int = 0) -> bool:
        """What is held is content, and so is an object of this size: looked at once, whatever marks
        are in it, so that time is linear."""
        self._add(self._content, self._held + self._rest[:size])
        self._rest = self._rest[size:]
        self._in_list, self._state = False, self._text
        self._clear()
        return True

    def _clear(self) -> None:
        self._held = self._name = ""
        self._scanned, self._depth, self._in_string = 0, 0, False

    def _until(self, mark: str, is_end: bool) -> tuple[str, str, str]:
        """The rest before the mark, the mark, and what is after it: without the mark, the end that
        may be its beginning."""
        before, found, after = self._rest.partition(mark) if mark else (self._rest, "", "")
        if found or is_end:
            return before, found, after
        sizes = range(min(len(mark) - 1, len(before)), 0, -1)
        size = next((size for size in sizes if before.endswith(mark[:size])), 0)
        return before[: len(before) - size], "", before[len(before) - size :]

    def _add(self, part: list[str], text: str) -> None:
        """Add a text to a part, but for the white space at its end, which waits."""
        core = text.rstrip()
        if not core:
            self._space += text
            return
        part.append((self._space + core).lstrip() if self._is_stripped else self._space + core)
        self._space, self._is_stripped = text[len(core) :], False

    def _end_of_object(self) -> int:
        """Where the object at the beginning of the rest ends; 0: it has not."""
        while sign := (_IN_STRING if self._in_string else _OUTSIDE).search(
            self._rest, self._scanned
        ):
            if sign[0] == "\\":  # what it escapes is missing
                self._scanned = sign.start()
                return 0
            self._scanned = sign.end()
            self._in_string ^= sign[0] == '"'
            self._depth += (sign[0] in ("{", "[")) - (sign[0] in ("}", "]"))
            if not self._depth:
                return self._scanned
        self._scanned = len(self._rest)
        return 0


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_reject)


def _members(text: str) -> dict[str, str]:
    """The members of an object in JSON, each value as it is written.

    Raises:
        ValueError, RecursionError: it is malformed, or nested too deep.
    """
    members: dict[str, str] = {}
    at = 0
    while sign := _NEXT.match(text, at):
        at = sign.end()
        if sign[1] == "}":
            break
        name, at = _JSON.raw_decode(text, at)
        if not (colon := _COLON.match(text, at)):
            break
        _, at = _JSON.raw_decode(text, colon.end())
        members[name] = text[colon.end() : at]
    if at != len(text):
        raise ValueError("not an object in JSON")
    return members


def _is_named(text: str) -> bool:
    """Whether the text begins with an object with a name, or with a part of one."""
    try:
        first, _ = _JSON.raw_decode(text)
    except (ValueError, RecursionError):
        return bool(_NAME_FIRST.match(text))
    return isinstance(first, dict) and "name" in first


def _arguments(members: dict[str, str]) -> str:
    """A call's arguments. Raises ValueError, LookupError: they are not an object."""
    arguments = members.get("arguments") or members["parameters"]
    if not isinstance(_JSON.decode(arguments), dict):
        raise ValueError("not an object")
    return arguments
