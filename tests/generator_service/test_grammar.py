"""Structured outputs by tokens of one byte each, compared with parsers of the same languages.

tests/conformance has them in every generator.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.engine import grammar
from generator_service.engine.grammar import Grammars, Matchers, TokenizerSpec, unpacked
from specrej import isolated
from specrej.contracts import Grammar, JsonObject, JsonSchema, Regex, StructuredOutput
from specrej.contracts.errors import InternalError, InvalidRequest, Overloaded
from tests.reward_service.tiny import make_tokenizer
from tests.serving import until

VOCABULARY = 261  # two logits more than the tokenizer has tokens
EOS, OTHER_END = 2, 100
TOKENIZER = make_tokenizer("<pad>")
SPEC = TokenizerSpec.of(TOKENIZER, VOCABULARY)
SIZE = JsonSchema(
    '{"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 120}},'
    ' "required": ["n"], "additionalProperties": false}'
)
WORDS = Regex(r"([a-c]{2,3}-)+[0-9]?")
SUMS = Grammar('start: term ("+" term)*\nterm: /[0-9]/ | "(" start ")"')


# Schemas that are refused, and a part of the reason.
SCHEMAS = {
    '{"type": "array", "uniqueItems": true}': "uniqueItems",
    '{"not": {}}': "not",
    '{"x-guidance": {"lenient": true}, "contains": {}}': "contains",
    '{"type": "integer", "minimum": 3, "maximum": 2}': "3",
    '{"$ref": "#"}': "",
    "{": "",
    # llguidance's numbers are float64.
    '{"enum": [1234567890123456789]}': "the number 1234567890123456789 has more",
    '{"type": "integer", "minimum": 9223372036854775807}': "9223372036854775807",
    '{"anyOf": [{"const": {"a": [9007199254740993]}}]}': "9007199254740993",
    '{"const": 123456789.12345679}': "123456789.12345679",
    '{"const": 1' + 400 * "0" + "}": "too large",
    '{"const": 0e99999999999999999999}': "in its exponent",
    '{"type": "number", "maximum": 1, "exclusiveMaximum": -1e9999999}': "-1E+9999999",
    '{"type": "number", "exclusiveMinimum": 4, "maximum": 4.5}': "exclusiveMinimum 4 beside",
    '{"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}': "exclusiveMaximum 0 beside",
    '{"type": "integer", "minimum": -9, "multipleOf": 3}': "multipleOf beside minimum -9",
    '{"type": "number", "multipleOf": 0.5, "exclusiveMaximum": -1.5}': "exclusiveMaximum -1.5",
    '{"type": "string", "format": "uuid4", "pattern": "^a"}': "uuid4",
    '{"type": "string", "format": "color"}': "color",
}


@cache
def grammars() -> Grammars:
    return Grammars(SPEC, [EOS, OTHER_END])


def matchers(output: StructuredOutput) -> Matchers:
    return grammars().compile(output).matchers()


def tokens(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def next_of(states: Matchers, *texts: list[int], excluded: Sequence[int] = ()) -> list[set[int]]:
    masks = states.allowed(range(len(texts)), texts, excluded)
    return [{*np.flatnonzero(row).tolist()} for row in unpacked(masks, VOCABULARY)]


def refusal(output: StructuredOutput, compiler: Grammars | None = None) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        (compiler or grammars()).compile(output)
    (violation,) = caught.value.violations
    return violation.field, violation.description


@pytest.mark.parametrize(
    ("output", "text", "following", "may_end"),
    [
        (SIZE, "", "{", False),
        (SIZE, '{"n":', " 0123456789", False),
        (SIZE, '{"n": 12', "0}", False),
        (SIZE, '{"n": 12}', "", True),
        (WORDS, "ab", "abc-", False),
        (WORDS, "ab-", "abc0123456789", True),
        (WORDS, "ab-7", "", True),
        (SUMS, "(1", "+)", False),
        (SUMS, "(1)", "+", True),
    ],
)
def test_tokens_that_may_come_next(
    output: StructuredOutput, text: str, following: str, may_end: bool
) -> None:
    """End tokens exactly where a text may end, also those whose bytes the text may have."""
    (allowed,) = next_of(matchers(output), tokens(text))
    ends = {EOS, OTHER_END} if may_end else set()
    assert allowed == {*tokens(following)} - {OTHER_END} | ends


UUID4 = "f47ac10b-58cc-4372-a567-0e02b2c3d479"
BOUNDS = {"minimum": -(2**63), "exclusiveMaximum": 2**63 - 1}
FRACTIONS = {"minimum": -0.30000000000000004, "maximum": 3.141592653589793}
UPLOAD = {"type": "string", "format": "binary"}


@pytest.mark.parametrize(
    ("schema", "conforming", "others"),
    [
        ({"type": "integer", **BOUNDS}, ["-7", "0", "9" * 14 + "8"], [str(2**63), "-1" + "0" * 19]),
        ({"type": "number", **FRACTIONS}, ["-0.29", "2.5"], ["-0.31", "3.2"]),
        ({"type": "integer", "minimum": 0, "multipleOf": 3}, ["0", "12"], ["4", "-3"]),
        ({"type": "string", "format": "uuid4"}, [f'"{UUID4}"'], ['"a"', f'"{UUID4[:-1]}"']),
        ({"type": "string", "format": "file-path"}, ['"/a b"'], ["1"]),
        ({"properties": {"format": UPLOAD}, "required": ["format"]}, ['{"format": "x"}'], ["{}"]),
        ({"properties": {"default": UPLOAD}, "required": ["default"]}, ['{"default": ""}'], ["{}"]),
        ({"enum": [{"format": "binary"}]}, ['{"format": "binary"}'], ["{}"]),
    ],
)
def test_schemas_of_pydantic(schema: object, conforming: list[str], others: list[str]) -> None:
    """Guards against refused bounds of 64 bits and formats, and a changed value of `enum`."""
    first = grammars().compile(JsonSchema(json.dumps(schema))).first

    def is_accepted(text: str) -> bool:
        state, ids = first.deep_copy(), tokens(text)
        return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()

    assert [*map(is_accepted, conforming)] == [True] * len(conforming)
    assert [*map(is_accepted, others)] == [False] * len(others)


@given(seed=st.integers(0, 10_000), output=st.sampled_from([SIZE, WORDS, SUMS, JsonObject()]))
def test_texts_that_end_conform(seed: int, output: StructuredOutput) -> None:
    """Random walks; each state is that of a candidate that reads all its tokens at once."""
    states, random, text = matchers(output), Random(seed), list[int]()
    while len(text) < 80:
        (allowed,) = next_of(states, text)
        assert allowed == next_of(matchers(output), text)[0]
        token = random.choice(sorted(allowed))
        if token in (EOS, OTHER_END):
            assert conforms(output, TOKENIZER.decode(text))
            return
        text.append(token)


def conforms(output: StructuredOutput, text: str) -> bool:
    match output:
        case Regex(pattern):
            return bool(re.fullmatch(pattern, text))
        case Grammar():
            return bool(re.fullmatch(r"[0-9+()]+", text)) and bool(eval(text) + 1)
        case JsonObject():
            return isinstance(json.loads(text), dict)
        case JsonSchema():
            value = json.loads(text)
            return [*value] == ["n"] and 0 <= value["n"] <= 120
    return False


def test_forks_and_cuts_change_no_state() -> None:
    """A fork has its parent's state, and the two go on apart; a candidate of the same number may
    come again with other tokens after a cut."""
    states = matchers(WORDS)
    next_of(states, tokens("ab"), tokens("abc"))
    states.keep([1], {7: 1, 8: 0, 9: 5})
    masks = states.allowed([1, 7, 8], [tokens("abc-"), tokens("abc"), tokens("ab")])
    rows = [{*np.flatnonzero(row).tolist()} for row in unpacked(masks, VOCABULARY)]
    assert rows == [next_of(matchers(WORDS), tokens(text))[0] for text in ("abc-", "abc", "ab")]
    assert next_of(states, tokens("b"))[0] == {*tokens("abc")}


def test_excluded_tokens_are_allowed_where_nothing_else_is() -> None:
    """Guards against rows without a token: min_tokens longer than every text that conforms."""
    ends = [EOS, OTHER_END]
    early, complete = next_of(matchers(WORDS), tokens("ab-"), tokens("ab-7"), excluded=ends)
    assert not early & {*ends}
    assert complete == {*ends}


def test_a_candidate_whose_tokens_do_not_conform_never_ends() -> None:
    """Guards against an answer that counts as complete. Others of the session go on."""
    lost, found = next_of(matchers(WORDS), tokens("ax"), tokens("ab"))
    assert {*tokens("xyz-1")} <= lost
    assert not lost & {EOS, OTHER_END, 0, 1}
    assert found == {*tokens("abc-")}


def test_masks_that_take_too_long_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one session's grammar in every step of all sessions."""
    monkeypatch.setattr("generator_service.engine.grammar._FIRST_S", -1.0)
    (lost,) = next_of(matchers(WORDS), tokens("ab"))
    assert {*tokens("xyz-1")} <= lost
    assert not lost & {EOS, OTHER_END}


@pytest.mark.parametrize(
    ("output", "field", "reason"),
    [
        *((JsonSchema(schema), "json_schema.schema", reason) for schema, reason in SCHEMAS.items()),
        (Regex("a(?=b)"), "regex.pattern", "look-ahead"),
        (Regex("("), "regex.pattern", "unclosed group"),
        (Regex("[^\\s\\S]"), "regex.pattern", ""),
        (Grammar("begin: "), "grammar.lark", "start"),
        (Grammar("start: <|nothing|>"), "grammar.lark", ""),
        (Grammar("start: <s>"), "grammar.lark", ""),
    ],
)
def test_what_is_not_supported_is_refused(
    output: StructuredOutput, field: str, reason: str
) -> None:
    """Guards against keywords that are ignored, and grammars without a text."""
    path, description = refusal(output)
    assert path == f"sampling.structured_output.{field}"
    assert description.startswith("is not supported: ")
    assert reason in description


@pytest.mark.parametrize(
    "output",
    [
        JsonSchema('{"type": "array", "maxItems": 1000000000}'),
        JsonSchema('{"type": "integer", "multipleOf": 999983}'),
        Grammar('start: %json {"type": "array", "maxItems": 10000000}'),
        Grammar("start: r0\n" + "".join(f'r{i}: r{i + 1} "a" | r{i + 1}\n' for i in range(2000))
                + 'r2000: "b"'),
    ],
)  # fmt: skip
def test_work_without_end_is_refused(output: StructuredOutput) -> None:
    """A few characters can describe work of hours. The next output is compiled again."""
    began = time.monotonic()
    refusal(output)
    assert time.monotonic() - began < 60
    assert next_of(matchers(Regex("abc")), [])[0] == {*tokens("a")}


def chained(depth: int) -> Grammar:
    """References one behind another, which are compiled recursively."""
    names = ["".join(chr(65 + n // 26**k % 26) for k in (2, 1, 0)) for n in range(depth)]
    rest = "\n".join(f"{one}:{other}" for one, other in itertools.pairwise(names))
    return Grammar(f'start:{names[0]}\n{rest}\n{names[-1]}:"a"')


def test_what_a_trial_accepts_needs_half_of_a_threads_stack() -> None:
    """Guards the service against an overflow, when it compiles what the trial process could."""
    assert next_of(matchers(chained(1000)), [])[0] == {*tokens("a")}
    path, description = refusal(chained(3000))
    assert path == "sampling.structured_output.grammar.lark"
    assert "too much time or memory" in description


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    """The generator starts with it."""
    spec = TokenizerSpec.of(object(), VOCABULARY)
    path, description = refusal(JsonObject(), Grammars(spec, [EOS]))
    assert path == "sampling.structured_output.json_object"
    assert "the model's tokenizer" in description


def test_a_trial_process_that_ends_or_hangs_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against valid outputs that stay refused because memory ran out once, and a process
    that blocks all later ones without the processor time that ends it."""
    compiler = Grammars(SPEC, [EOS])
    compiler.compile(Regex("a+"))
    process = compiler._trials.process
    assert process
    process.kill()
    process.wait()
    compiler.compile(Regex("b+"))
    process = compiler._trials.process
    assert process
    process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(isolated, "_PATIENCE_S", 0.2)
        with pytest.raises(InternalError, match="cannot compile structured outputs"):
            compiler.compile(Regex("c+"))
    compiler.compile(Regex("c+"))


async def test_tenants_try_their_outputs_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a tenant against the queue of another one, whose length is bounded."""
    compiler = Grammars(SPEC, [EOS])
    may_end, tried = threading.Event(), list[str]()

    def trial(source: str) -> str:
        tried.append(source)
        return "" if may_end.wait(60) else "late"

    monkeypatch.setattr(compiler, "_tried", trial)
    monkeypatch.setattr(grammar, "_MOST_WAITING", 5)
    outputs = [Regex(letter) for letter in "abcde"]
    many = [asyncio.ensure_future(compiler.compiled(one, "many")) for one in outputs]
    await until(lambda: len(tried) == 1)
    one = asyncio.ensure_future(compiler.compiled(Regex("z"), "one"))
    with pytest.raises(Overloaded, match="5 structured outputs wait"):
        await compiler.compiled(Regex("f"), "many")
    may_end.set()
    await asyncio.wait_for(asyncio.gather(one, *many), 60)
    assert "z" in tried[1]
    await compiler.compiled(Regex("f"), "many")


def test_an_output_that_takes_too_long_costs_no_new_process() -> None:
    """Guards the processor against a second for each of them; trials run below all other work."""
    compiler = Grammars(SPEC, [EOS])
    compiler.compile(Regex("a+"))
    process = compiler._trials.process
    assert process
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    if (group := Path(f"/proc/{process.pid}/autogroup")).exists():
        assert group.read_text().endswith(" nice 19\n")
    refusal(JsonSchema('{"type": "array", "maxItems": 1000000001}'), compiler)
    compiler.compile(Regex("b+"))
    assert compiler._trials.process is process


async def test_an_output_that_was_tried_waits_for_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards other callers against one whose outputs take too long, again and again."""
    compiler = Grammars(SPEC, [EOS])
    assert await compiler.compiled(WORDS)
    run, may_end, tried = compiler._tried, threading.Event(), list[str]()

    def slow(source: str) -> str:
        tried.append(source)
        return run(source) if may_end.wait(60) else ""

    monkeypatch.setattr(compiler, "_tried", slow)
    bad = Regex("(")
    refused = [asyncio.ensure_future(compiler.compiled(bad)) for _ in range(2)]
    await until(lambda: len(tried) == 1)
    assert await asyncio.wait_for(compiler.compiled(WORDS), 60)
    may_end.set()
    for compiling in refused:
        with pytest.raises(InvalidRequest):
            await asyncio.wait_for(compiling, 60)
    assert len(tried) == 1
