"""Parts of answers: each format, whole and split anywhere; malformed calls are content."""

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specrej.answer_form import PartsReader, answer_text, is_malformed, parts_of, written
from specrej.contracts import PLAIN, AnswerForm, AnswerParts, ToolCall

FORMATS = ("hermes", "llama3", "mistral", "json")
THINKS: dict[str, Any] = {"thinking_begin": "<think>", "thinking_end": "</think>"}
FORMS = [
    AnswerForm(tool_format=tools, **thinking)
    for tools in ("", *FORMATS)
    for thinking in (dict[str, Any](), THINKS, THINKS | {"is_thinking": True})
]
F = '{"name": "f", "arguments": {"a": "</tool_call> \\"}"}}'
A = '{"a": "</tool_call> \\"}"}'
G = '{"name": "g.2", "arguments": {}}'

# A format, a text, its content, and its calls.
CASES = [
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", "", [("f", A)]),
    ("hermes", f"Look.\n<tool_call>{F}</tool_call>", "Look.", [("f", A)]),
    (
        "hermes",
        f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>\n",
        "",
        [("f", A), ("g.2", "{}")],
    ),
    ("hermes", f"<tool_call>{F}", "", [("f", A)]),
    ("hermes", f"a <tool_call>{F}</tool_call> b", "a b", [("f", A)]),
    ("llama3", F.replace("arguments", "parameters"), "", [("f", A)]),
    ("llama3", f"\n<|python_tag|>{F}; {G}", "", [("f", A), ("g.2", "{}")]),
    ("llama3", f"{F}\n{G}", "", [("f", A), ("g.2", "{}")]),
    ("mistral", f"Look: [TOOL_CALLS] [{F}, {G}]", "Look:", [("f", A), ("g.2", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    ("json", F, "", [("f", A)]),
    ("json", f"{F}\n{G}\n", "", [("f", A), ("g.2", "{}")]),
    # Numbers stay as the model wrote them.
    ("json", '{"name":"f","arguments":{"a":1.50}}', "", [("f", '{"a":1.50}')]),
]
MALFORMED = [
    ("hermes", "Use <tool_call> for calls"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>'),
    ("llama3", '{"name": "Ann", "age": 3}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", '[TOOL_CALLS] {"name": "f"}'),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("json", '{"name": "f", "arguments": {"a": 1'),
    ("json", ' {"arguments": {}, "name": 3} or so'),
    ("json", '{"name": 3, "arguments": {}}'),
    ("json", '{"name": "f", "arguments": {"a": ' + "[" * 3000 + "]" * 3000 + "}}"),
    ("json", '{"name": "f", "arguments": {},}'),
]
# Texts that begin as calls may.
NO_CALLS = [
    ("json", "  {not JSON}"),
    ("json", '{"a": 1}'),
    ("json", '{"a": {"name": "f"}}\n{"name": "f"}'),
    ("json", "{"),
    ("llama3", ' {"arguments": {}}, {'),
    ("llama3", f"Here: {F}"),
    ("json", f"Call {F}"),
]


def read(pieces: list[str], form: AnswerForm) -> AnswerParts:
    reader = PartsReader(form)
    deltas = [*map(reader.feed, pieces), reader.end()]
    calls: dict[int, ToolCall] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        before = calls.get(call.index, ToolCall(call.id, call.name, ""))
        calls[call.index] = ToolCall(before.id, before.name, before.arguments + call.arguments)
    return AnswerParts(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(calls[index] for index in sorted(calls)),
    )


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CASES)
def test_calls_are_read(tools: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    form = AnswerForm(tools)
    expected = [ToolCall(f"call_7_{i}", *call) for i, call in enumerate(calls)]
    parts = parts_of(text, form, complete=True, candidate=7)
    assert parts == AnswerParts(content, "", tuple(expected))
    text = f"<think>\nHm.\n</think>\n\n{text}"
    parts = parts_of(text, AnswerForm(tools, **THINKS), complete=True, candidate=7)
    assert parts == AnswerParts(content, "Hm.", tuple(expected))
    assert not is_malformed(parts, form)


@pytest.mark.parametrize(("tools", "text"), MALFORMED + NO_CALLS)
def test_malformed_calls_are_content(tools: str, text: str) -> None:
    parts = parts_of(text, AnswerForm(tools), complete=True)
    assert parts == AnswerParts(text)
    assert is_malformed(parts, AnswerForm(tools)) is ((tools, text) in MALFORMED)


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    text = f"<tool_call>oh</tool_call> <tool_call>{G}</tool_call>"
    parts = parts_of(text, AnswerForm("hermes"), complete=True)
    assert parts and (parts.content, len(parts.tool_calls)) == ("<tool_call>oh</tool_call>", 1)


@pytest.mark.parametrize("tools", FORMATS)
def test_what_is_written_is_read(tools: str) -> None:
    calls = (ToolCall("call_0_0", "f", A), ToolCall("call_0_1", "g.2", '{"x": [1, {}]}'))
    text = written(calls, AnswerForm(tools))
    assert parts_of(text, AnswerForm(tools), complete=True) == AnswerParts(tool_calls=calls)


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"),
        *(F, G, A, '{"name": "f", ', '"arguments": ', "hello", ", ", "; ", "[ARGS]", "</to"),
        *'[]{}"\\<f \né',  # characters
    ]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


@given(st.sampled_from(FORMS), st.lists(PIECES, max_size=12), st.data())
@example(AnswerForm("json"), [F, "\n", "{"], None)
@example(AnswerForm("hermes", **THINKS), ["<thi", "nk>a", "\n", "</think", ">", "\n", "b "], None)
def test_deltas_together_are_the_parts_of_the_whole(
    form: AnswerForm, pieces: list[str], data: st.DataObject | None
) -> None:
    """However the text is split, by character too."""
    text = "".join(pieces)
    if data:
        places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    whole = parts_of(text, form, complete=True)
    assert read(pieces, form) == read([*text], form) == (whole or AnswerParts(text))
    for call in whole.tool_calls if whole else ():
        assert isinstance(json.loads(call.arguments), dict)


@given(st.sampled_from(FORMS), st.lists(PIECES, max_size=12))
def test_more_text_only_adds_to_the_parts(form: AnswerForm, pieces: list[str]) -> None:
    """What is left out of an incomplete text is in no part that changes later."""
    text = ""
    for piece in pieces:
        before = parts_of(text, form, complete=False)
        text += piece
        after = parts_of(text, form, complete=True)
        if before and after:
            assert after.content.startswith(before.content)
            assert after.reasoning.startswith(before.reasoning)
            assert after.tool_calls[: len(before.tool_calls)] == before.tool_calls


@given(st.text(alphabet="ab \n<{", max_size=9))
def test_texts_without_marks_are_content_as_they_are(text: str) -> None:
    assert parts_of(text, AnswerForm("hermes"), complete=True) == AnswerParts(text)


def test_a_plain_text_has_no_parts() -> None:
    assert parts_of("text", PLAIN, complete=True) is None


@pytest.mark.parametrize(
    ("text", "is_thinking", "answer", "reasoning"),
    [
        ("<think>a</think>\nb", False, "b", "a"),
        ("\n<think>a", False, "", "a"),
        ("a</think>\n\nb", True, "b", "a"),
        ("<think>a</think>b", True, "b", "a"),  # some models repeat what the template wrote
        ("a </th", True, "", "a"),
        ("b <think>", False, "b <think>", ""),
        ("<thi", False, "", ""),
    ],
)
def test_reasoning_is_no_part_of_the_answer(
    text: str, is_thinking: bool, answer: str, reasoning: str
) -> None:
    form = AnswerForm("hermes", **THINKS, is_thinking=is_thinking)
    assert answer_text(text, form) == answer
    assert parts_of(text, form, complete=False) == AnswerParts(answer, reasoning)


@pytest.mark.parametrize(
    ("text", "num_arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 10**6 + '"}}', 1_000_009),
        ("<tool_call>{" * 50_000, 0),
        ("<tool_call>{" * 50_000 + "}" * 50_000, 0),
    ],
)
def test_time_is_linear(text: str, num_arguments: int) -> None:
    """Of a megabyte, a few characters at a time: each is looked at once."""
    reader, began = PartsReader(AnswerForm("hermes")), time.process_time()
    deltas = [reader.feed(text[at : at + 50]) for at in range(0, len(text), 50)] + [reader.end()]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert sum(len(call.arguments) for call in calls) == num_arguments
    assert time.process_time() - began < 3
