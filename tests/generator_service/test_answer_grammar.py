"""Grammars of answers with calls and reasoning: what they accept is what `answer_form` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from generator_service.engine import grammar
from generator_service.engine.answer_grammar import constrained
from specrej import contracts as c
from specrej.answer_form import MARKS, parts_of

pytestmark = pytest.mark.usefixtures("one_thread")

THINKING = ("<think>", "</think>")
# References, so that parameters have definitions of their own; a name is that of a keyword.
CITY = {
    "properties": {"city": {"$ref": "#/$defs/City"}, "default": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Oslo", "Rome"]}},
}
TOOLS = (c.Tool("get_weather", "Weather.", json.dumps(CITY)), c.Tool("now", "The time."))
WEATHER = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "now", "arguments": {}}'
WRONG = WEATHER.replace("Rome", "Rom")
LLAMA = [one.replace("arguments", "parameters") for one in (WEATHER, NOW, WRONG)]

# By format: answers, and the number of their calls; None: they do not conform.
ANSWERS: dict[str, list[tuple[str, int | None]]] = {
    "hermes": [
        (f"<tool_call>\n{WEATHER}\n</tool_call>", 1),
        (f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>", 2),
        ("Oh, {hm}.", 0),
        ("<tool_call>\noh", None),
        (f"<tool_call>\n{WRONG}\n</tool_call>", None),
        (f"<tool_call>\n{WEATHER}", None),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{WEATHER}, {NOW}]", 2),
        (f"[TOOL_CALLS][{WEATHER}]", 1),
        ('[TOOL_CALLS]get_weather{"city": "Rome"}', 1),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}', 2),
        ("Oh, {hm}.", 0),
        ("[TOOL_CALLS]oh", None),
        (f"[TOOL_CALLS][{WRONG}]", None),
    ],
    "llama3": [
        (LLAMA[0], 1),
        (f"{LLAMA[0]}; {LLAMA[1]}", 2),
        ("Oh, {hm}.", 0),
        ("{oh", None),
        (" {", None),
        (LLAMA[2], None),
    ],
    "json": [
        (WEATHER, 1),
        (f"{WEATHER}\n{NOW}", 2),
        ("Oh, {hm}.", 0),
        ("{oh", None),
        (" {", None),
        (WRONG, None),
    ],
}


@cache
def tokenizer(has_marks: bool) -> Any:
    """The embedded model's; its marks are tokens, or spelled."""
    made = AutoTokenizer.from_pretrained(".models/SmolLM2-135M-Instruct")
    if has_marks:
        marks = (*MARKS, *THINKING)
        made.add_tokens([AddedToken(text, special=text[0] == "[") for text in marks])
    return made


def mark_ids(has_marks: bool) -> dict[str, int]:
    added = tokenizer(has_marks).added_tokens_decoder.items()
    return {token.content: id_ for id_, token in added if token.content in (*MARKS, *THINKING)}


@cache
def vocabulary(has_marks: bool) -> grammar.Vocabulary:
    spec = grammar.TokenizerSpec.of(tokenizer(has_marks), 0, tuple(mark_ids(has_marks).values()))
    return grammar.Vocabulary(spec.load(), [2], spec.mark_ids)


def compiled(
    form: c.AnswerForm,
    sampling: c.Sampling | None = None,
    *,
    has_marks: bool,
    may_repeat: bool = True,
    **of_prompt: Any,
) -> grammar.Matchers:
    prompt = c.Prompt((c.Message("user", "Hi"),), **of_prompt)
    tokens = mark_ids(has_marks)
    output = constrained(prompt, sampling or c.Sampling(), form, tokens, may_repeat=may_repeat)
    assert output
    return grammar.CompiledGrammar.of(grammar._source(output), vocabulary(has_marks)).matchers()


@cache
def token_ids(has_marks: bool) -> dict[str, int]:
    made = tokenizer(has_marks)
    return {made.decode([id_]): id_ for id_ in range(len(made))}


def conforms(states: grammar.Matchers, text: str, *, has_marks: bool) -> bool:
    """Whether tokens may be drawn that spell the text, and an end then."""
    known, ids = token_ids(has_marks), list[int]()
    marks = mark_ids(has_marks)
    while text:
        mask = allowed(states, ids)
        # Up to the next mark, which is a token of its own.
        places = [text.find(mark) for mark in marks]
        longest = min((place for place in places if place > 0), default=20)
        sizes = [k for k in range(1, longest + 1) if mask[known.get(text[:k], 0)]]
        if not sizes:
            return False
        ids.append(known[text[: sizes[-1]]])
        text = text[sizes[-1] :]
    return bool(allowed(states, ids)[2])


def allowed(states: grammar.Matchers, ids: Sequence[int]) -> Any:
    """After these tokens, which go on from those of the last call; none: a text begins."""
    if not ids:
        states.keep([], {})
    return grammar.unpacked(states.allowed([0], [ids]), 2**16)[0]


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("thinks", [None, False, True])
@pytest.mark.parametrize("tool_format", ANSWERS)
def test_answers_conform_exactly_if_their_calls_do(
    tool_format: str, thinks: bool | None, has_marks: bool
) -> None:
    """Guards calls of other tools or arguments, and refusals of what models write."""
    form = c.AnswerForm(tool_format)
    if thinks is not None:
        form = c.AnswerForm(tool_format, *THINKING, thinks)
    reasoning = {None: [""], False: ["", "<think>Hm.</think>"], True: ["Hm.</think>\n\n"]}[thinks]
    # What is required and how often does not depend on reasoning.
    calls = [*product(("auto", "required"), (True, False))]
    for choice, several in calls if thinks is None else calls[1:3]:
        states = compiled(
            form, has_marks=has_marks, tools=TOOLS, tool_choice=choice, parallel_tool_calls=several
        )
        for before, (text, num_calls) in product(reasoning, ANSWERS[tool_format]):
            if num_calls is not None:
                parts = parts_of(before + text, form, complete=True)
                assert parts and len(parts.tool_calls) == num_calls
            expected = num_calls is not None and (num_calls > 0 or choice == "auto")
            expected = expected and (several or num_calls != 2)
            found = conforms(states, before + text, has_marks=has_marks)
            assert found is expected, (choice, several, before + text)


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("tool_format", ANSWERS)
def test_random_answers_are_valid(tool_format: str, has_marks: bool) -> None:
    """Any tokens that may be drawn, with marks likely among them: all calls are valid."""
    random, form, made = Random(7), c.AnswerForm(tool_format), tokenizer(has_marks)
    # Random characters hardly spell a mark.
    choice = "auto" if has_marks else "required"
    states = compiled(form, has_marks=has_marks, tools=TOOLS, tool_choice=choice)
    likely = [*mark_ids(has_marks).values(), *made("<tool_call>[ARGS]{ ; </")["input_ids"], 2]
    num_calls = 0
    for _ in range(30):
        ids: list[int] = []
        while len(ids) < 60 and (not ids or ids[-1] != 2):
            mask = allowed(states, ids)
            preferred = [id_ for id_ in likely if mask[id_]]
            choices = preferred if preferred and random.random() < 0.5 else np.flatnonzero(mask)
            ids.append(int(random.choice(choices)))
        if ids[-1] != 2:
            continue
        parts = parts_of(made.decode(ids[:-1]), form, complete=True)
        for call in parts.tool_calls if parts else ():
            tool = next(tool for tool in TOOLS if tool.name == call.name)
            jsonschema_rs.validate(json.loads(tool.parameters or "{}"), json.loads(call.arguments))
            num_calls += 1
        mark = "<tool_call>" if tool_format == "hermes" else "[TOOL_CALLS]"
        assert not parts or mark not in parts.content
    assert num_calls > 3


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (c.AnswerForm("hermes"), "Oh <tool_call>x"),
        (c.AnswerForm("mistral"), "Oh [TOOL_CALLS]x"),
        (c.AnswerForm("hermes", *THINKING, is_thinking=True), "Hm </think>x"),
    ],
)
def test_marks_that_are_tokens_are_not_spelled(form: c.AnswerForm, text: str) -> None:
    """They would be read as marks, with anything after them."""
    states = compiled(form, has_marks=True, tools=TOOLS)
    ids = tokenizer(False)(text, add_special_tokens=False)["input_ids"]
    assert not all(allowed(states, ids[:at])[id_] for at, id_ in enumerate(ids))
    first = tokenizer(False)(text.split()[0], add_special_tokens=False)["input_ids"]
    assert all(allowed(states, first[:at])[id_] for at, id_ in enumerate(first))


def test_a_chosen_tool_is_called_once_where_the_template_has_one_call() -> None:
    choice: dict[str, Any] = {"tool_choice": "required", "tool_name": "now"}
    states = compiled(
        c.AnswerForm("json"), has_marks=False, may_repeat=False, tools=TOOLS, **choice
    )
    assert conforms(states, NOW, has_marks=False)
    assert not conforms(states, WEATHER, has_marks=False)
    assert not conforms(states, f"{NOW}\n{NOW}", has_marks=False)


SEVEN = c.JsonSchema(
    '{"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"],'
    ' "additionalProperties": false}'
)


@pytest.mark.parametrize(
    ("output", "answer", "other"),
    [
        (SEVEN, '{"a": 7}', '{"a": 8}'),
        (c.JsonObject(), "{}", "[]"),
        (c.Regex(r"a/b\/[0-9]+\\"), "a/b/12\\", "a"),
        (c.Grammar('start: A "-" B\nA: /x+/\nB: "y"'), "xx-y", "xx-x"),
        (None, "Hi there", ""),
    ],
)
@pytest.mark.parametrize("most", [0, 3])
def test_structured_outputs_follow_the_reasoning(
    output: c.StructuredOutput | None, answer: str, other: str, most: int
) -> None:
    """And reasoning has at most so many tokens: then its end comes."""
    sampling = c.Sampling(structured_output=output, max_thinking_tokens=most)
    if not output and not most:
        prompt = c.Prompt((c.Message("user", "Hi"),))
        assert not constrained(prompt, sampling, c.AnswerForm("", *THINKING), {}, may_repeat=True)
        return
    states = compiled(c.AnswerForm("", *THINKING), sampling, has_marks=True)
    for before in ("", "<think>a b</think>\n\n"):
        assert conforms(states, before + answer, has_marks=True)
        assert not other or not conforms(states, before + other, has_marks=True)
    assert conforms(states, f"<think>a b c d</think>{answer}", has_marks=True) is not bool(most)
    if most:
        begun: list[int] = tokenizer(True)("<think>a b c", add_special_tokens=False)["input_ids"]
        states.keep([], {})
        (end,) = np.flatnonzero(allowed(states, begun))
        assert end == mark_ids(True)["</think>"]
        # A fork has its parent's bound.
        states.allowed([1], [begun[:-1]])
        states.keep([1], {5: 1})
        states.allowed([5], [begun])
        assert grammar.unpacked(states.allowed([5], [begun]), 2**16)[0].sum() == 1


@pytest.mark.parametrize("parameters", ['{"type": "string"}', '{"minimum": 9007199254740993}'])
def test_parameters_that_are_not_supported(parameters: str) -> None:
    prompt = c.Prompt((c.Message("user", "Hi"),), tools=(c.Tool("f", "", parameters),))
    with pytest.raises(ValueError, match=r"type object|15 digits"):
        constrained(prompt, c.Sampling(), c.AnswerForm("json"), {}, may_repeat=True)
