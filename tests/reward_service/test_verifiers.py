"""The kinds `answer`, `checks` and `schema`, and the data that requests give them and others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reward_service import verifier
from reward_service.kinds.checks import CHECKS, Check, Instruction, _make
from reward_service.kinds.schema import extract_json, is_json, may_become_json
from reward_service.reward import as_candidates, score_batch
from specrej import extraction, isolated
from specrej.contracts import Candidate, FinishReason, Prompt
from specrej.contracts.errors import InvalidRequest
from specrej.remote import RemoteRewards
from tests.reward_service.endpoint import served
from tests.reward_service.tiny import load, working
from tests.world import channel_to, reward_backend

PROMPT = Prompt.from_user("How many?")


@pytest.fixture(scope="module")
def answer() -> Any:
    return load("answer")


@pytest.fixture(scope="module")
def schemas() -> Any:
    return load("schema")


def scores(
    reward: Any, data: Any, *texts: str, finish: FinishReason | None = FinishReason.STOP
) -> list[float]:
    session = reward.open_with(PROMPT, json.dumps(data))
    return list(score_batch(session, reward, as_candidates(texts, finish)).values)


def violations(reward: Any, data: str) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as failure:
        reward.open_with(PROMPT, data)
    return {violation.field: violation.description for violation in failure.value.violations}


# Answers.


@pytest.mark.parametrize(
    ("data", "right", "wrong"),
    [
        ({"answer": "Paris"}, [" Paris\n"], ["paris", "In Paris", ""]),
        ({"answer": 1250, "kind": "number"}, ["so 1,250.0 dollars", "3 or 1250"], ["1250 - 3", ""]),
        ({"answer": -3, "kind": "number"}, ["it is -3", "\u22123."], ["5-3", "3"]),
        ({"answer": "0.5", "kind": "number", "tolerance": 0.01}, ["0.509", "5e-1"], [".05"]),
        ({"answer": "7", "extract": "last_number"}, ["5 + 2 = 7.", "7%"], ["7 or 8"]),
        ({"answer": "7", "extract": "boxed"}, [r"\boxed{\boxed{7}}"], [r"\boxed{7} \boxed{8}"]),
        ({"answer": "a}b{", "extract": "boxed"}, [], [r"\boxed{a}b{", r"\boxed{a", "a"]),
        ({"answer": "{a}", "extract": "boxed"}, [r"\boxed{b} or \boxed{{a}}."], [r"\boxed{{a}"]),
        ({"answer": "42", "extract": "after:####"}, ["#### 1\n#### 42\nbye"], ["42", "####42####"]),
        ({"answer": "B", "extract": r"regex:(?i)answer: *([A-D])"}, ["Answer: A, answer:B"], ["B"]),
        ({"answer": "(?i)yes|sure", "kind": "regex"}, ["Yes!", "surely"], ["no"]),
        ({"answer": "1/2", "kind": "math"}, ["it is $0.5$", r"\boxed{\frac{2}{4}}"], ["$2$", ""]),
        ({"answer": "x+1", "kind": "math", "extract": "boxed"}, [r"\boxed{1+x}"], [r"\boxed{x}"]),
    ],
)  # fmt: skip
def test_answers(answer: Any, data: Any, right: list[str], wrong: list[str]) -> None:
    assert scores(answer, data, *right, *wrong) == [1.0] * len(right) + [0.0] * len(wrong)
    # Truncated texts are final, growing ones may still say anything.
    assert scores(answer, data, *wrong, finish=FinishReason.LENGTH) == [0.0] * len(wrong)
    assert scores(answer, data, *wrong, finish=None) == [1.0] * len(wrong)


def test_boxes_are_found_in_linear_time() -> None:
    """Guards the service against a text of 8 MB: a part of it was made for each box."""
    assert extraction.boxed("\\boxed{" * 200_000 + "}" * 200_000) == ""


def test_mathematics_without_end_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the service against sympy: powers of powers take all memory and never return."""
    monkeypatch.setattr(isolated, "CPU_S", 0.3)
    monkeypatch.setattr(isolated, "_MOST_ENDED", 2)
    answer = load("answer")
    data = {"answer": "4", "kind": "math"}
    bomb = "$9^{9^{9^{9}}}$ $(x+y+z+1)^{99999}$"
    texts = (r"$\frac{8}{2}$", bomb, "$4$", "$9^{9^{9^{9}}}$", "$5-1$")  # the last one is not tried
    assert scores(answer, data, *texts) == [1.0, 0.0, 1.0, 0.0, 0.0]


# Checks. Every row: arguments, texts that have what is required, texts that do not, and beginnings
# that no text can repair.

ROWS: dict[str, tuple[dict[str, Any], list[str], list[str], list[str]]] = {
    "keywords:existence": ({"keywords": ["Tea", "milk"]}, ["tea, MILK"], ["tea"], []),
    "keywords:frequency": ({"keyword": "Ab", "frequency": 2, "relation": "exactly"},
        ["ab AB", "xababx"], ["ab"], ["ababab"]),
    "keywords:forbidden_words": ({"forbidden_words": ["cat", "c++", "new york", "ας"]},
        ["concat a catalogue cat́", "", "new\nyork \u03b1\u03c3\u03b1"],
        ["a CAT", "(cat)", "ΑΣ"], ["the cat.", "cat ", "New York!", "c++ is"]),
    "keywords:letter_frequency": ({"letter": "e", "let_frequency": 3, "let_relation": "less than"},
        ["see", ""], ["Eve ate"], ["eEe"]),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at most"},
        ["one two, three!", "a"], ["one two three four"], ["one two three f"]),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "exactly"},
        ['He said "no." She left', "It is 3.5. Really?!"], ["One.", "A. B. C."], ["A? B! C"]),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2},
        ["a\n***\nb", "***a****b***", "a***b"], ["a", "a\n\nb"], ["a***b***c"]),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}, ["First\n\n*then* we"],
        ["Then\n\nnow", "a\n\nthe"], ["a\n\nno", "a\n\nthens", "a\n\nthen\n\nb"]),
    "length_constraints:max_line_length": ({"num_characters": 3},
        ["abc\nd"], ["abcd"], ["a\nbcde"]),
    "count:word_count_range": ({"min_words": 2, "max_words": 3},
        ["a b", "a b c"], ["a", "a b c d"], ["a b c d"]),
    "count:unique_word_count": ({"N": 2}, ["a b A"], ["a A"], []),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 1, "capital_relation": "at most"}, ["NO Way", "USA and Ab"],
        ["A B"], ["NO WAY "]),
    "change_case:english_capital": ({}, ["HI 5!"], ["Hi", "5"], ["HI a"]),
    "change_case:english_lowercase": ({}, ["hi 5!ß"], ["Hi", "5"], ["hiA", "ǅ"]),
    "punctuation:no_comma": ({}, ["a; b", ""], ["a, b"], ["a,"]),
    "format:no_whitespace": ({}, ["ab\n"], ["a b"], ["a b"]),
    "detectable_content:number_placeholders": ({"num_placeholders": 2},
        ["[a] [b c]"], ["[a] [b"], []),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"},
        ["Hi\n p. p.s. bye"], ["Hi P.P.S", "P.S. a"], []),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2},
        ["x\n* a\n - b", "- a\n- b\n**c**"], ["* a"], ["* a\n* b\n* "]),
    "detectable_format:constrained_response": ({}, ["So: My answer is no."], ["No."], []),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2},
        ["*a* and *b c*"], ["*a*", "*a\nb* *c*"], []),
    "detectable_format:multiple_sections": ({"section_spliter": "Section", "num_sections": 2},
        ["section 1 a\nSECTION2"], ["Section 1"], []),
    "detectable_format:json_format": ({},
        ['{"a": [1.5e3, "\\u00e9`", null]}', '```json\n{"a":\n"`"}\n```\nx', " -1 ", "```\n[]"],
        ["{", "", "a", "`1`"], ["Sure", '{"a": 1} and', "[01", "```\n{a", "```json\n{}}"]),
    "detectable_format:title": ({}, ["<<A b>> text"], ["<<>>", "<< >>", "<a>"], []),
    "combination:two_responses": ({},
        ["a\n******\nb"], ["a", "a******a"], ["a******b******c"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Was ist Süßes?"},
        ["\nwas ist SÜSSES? Eis."], ["Was"], ["Was ist Sä", "Hm"]),
    "startend:start_checker": ({"start_phrase": "Dear A"},
        ["dear Ann"], ["Dear"], ["Hi", "dear B"]),
    "startend:end_checker": ({"end_phrase": "Bye."}, ['"so bye." '], ["Bye. x"], []),
    "startend:quotation": ({}, [' "a" '], ["a", '"'], ["a", "  'a"]),
}  # fmt: skip
NOISE = [*' .,aAéßΣİǅ_*"\n', "\n\n", "***", "! "]


def made(name: str) -> Check:
    return _make(Instruction(id=name, kwargs=ROWS[name][0]), "")


def test_every_check_has_a_row() -> None:
    assert ROWS.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_checks(name: str) -> None:
    check, (_, right, wrong, beyond_repair) = made(name), ROWS[name]
    assert [text for text in right if not check.holds(text)] == []
    assert [text for text in wrong + beyond_repair if check.holds(text)] == []
    assert [text for text in beyond_repair if not check.is_broken(text)] == []
    prefixes = [text[:end] for text in right for end in range(len(text) + 1)]
    assert [prefix for prefix in prefixes if check.is_broken(prefix)] == []


@pytest.mark.parametrize("name", ROWS)
@given(data=st.data())
def test_no_beginning_of_a_text_that_holds_is_broken(name: str, data: st.DataObject) -> None:
    """Guards candidates that would have passed against a veto while they grow."""
    check, (arguments, right, wrong, beyond_repair) = made(name), ROWS[name]
    texts = [*right, *wrong, *beyond_repair, *map(str, arguments.values())]
    words = [word for text in texts for word in text.split()]
    parts = st.lists(st.sampled_from([*words, *texts, *NOISE]), max_size=6)
    text = "".join(data.draw(parts))
    if check.holds(text):
        assert not any(check.is_broken(text[:end]) for end in range(len(text) + 1))


def test_score_of_checks_is_their_share_or_all_of_them() -> None:
    reward = load("checks")
    names = [{"id": "punctuation:no_comma"}, {"id": "startend:quotation", "kwargs": {"x": None}}]
    assert scores(reward, {"checks": names}, "a", 'a, "', '"a"') == [0.5, 0.0, 1.0]
    assert scores(reward, {"checks": names}, "", '"a,', finish=None) == [1.0, 0.5]
    assert scores(reward, {"checks": names, "all": True}, "a", '"a"') == [0.0, 1.0]


# Schemas.


@pytest.mark.parametrize(
    ("extract", "right", "wrong", "beyond_repair"),
    [
        ("whole", [' {"a": 1}\n'], ["{}", '{"a": 1', ""], ["Here", '{"a" 1', '{"a": 1} x']),
        (
            "fence",
            ['So:\n```json\n{"a": 1}\n```\nend'],
            ['{"a": 1}'],
            ["```\nHere", "```\n{}\n```"],
        ),
        ("first_object", ['So {"a": 1, "b": "}\\""} [}'], ["[]"], ["so {a", '{"b": 1} {"a": 1}']),
    ],
)
def test_schemas(
    schemas: Any, extract: str, right: list[str], wrong: list[str], beyond_repair: list[str]
) -> None:
    schema = {"required": ["a"], "properties": {"a": {"type": "integer"}}}
    data = {"schema": schema, "extract": extract}
    texts = [*right, *wrong, *beyond_repair]
    assert scores(schemas, data, *texts) == [float(text in right) for text in texts]
    prefixes = [text[:end] for text in (*right, *wrong) for end in range(len(text) + 1)]
    assert min(scores(schemas, data, *prefixes, finish=None)) == 1.0
    assert max(scores(schemas, data, *beyond_repair, finish=None)) == 0.0


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # hypothesis computes codecs for seconds
JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@given(JSON, TEXTS.map(lambda text: text[:5]), st.booleans())
@example({"\ud83d\ude00": "}{```\\"}, "`", True)
def test_no_beginning_of_json_is_refused(value: Any, noise: str, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=1)
    assert is_json(text)
    assert all(may_become_json(text[:end]) for end in range(len(text)))
    fenced = f"{noise}```json\n{text}\n```{noise}"
    wrapped = f'{noise.replace("{", "")}{{"a": {text}}}{noise}'
    for whole, extract in ((fenced, "fence"), (wrapped, "first_object")):
        if (document := extract_json(whole, extract))[1] and is_json(document[0]):
            for end in range(len(whole)):
                part, is_complete = extract_json(whole[:end], extract)
                assert (part, is_complete) == document or may_become_json(part)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema"},
        {"$ref": "file:///etc/passwd"},
        {"$schema": "http://127.0.0.1:9/draft"},
        {"$ref": "#/nowhere"},
        {"pattern": "(?=a)b"},
        {"type": "secret"},
        "secret",
    ],
)
def test_schemas_that_cannot_be_used_are_refused(schemas: Any, schema: Any) -> None:
    found = violations(schemas, json.dumps({"schema": schema}))
    assert list(found) == ["data.schema"] and "secret" not in str(found)


def test_hostile_schemas_end(schemas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the service against schemas that double their work with every reference."""
    data: dict[str, Any] = {"schema": {"pattern": "^(a+)+$"}}
    assert scores(schemas, data, json.dumps("a" * 9999 + "b"), "[" * 99_999) == [0.0, 0.0]
    monkeypatch.setattr(isolated, "CPU_S", 0.2)
    schemas = load("schema")
    definitions: dict[str, Any] = {"0": {"type": "string"}}
    for n in range(40):
        definitions[str(n + 1)] = {"anyOf": [{"$ref": f"#/$defs/{n}"}] * 2}
    data = {"schema": {"$defs": definitions, "$ref": "#/$defs/40"}}
    assert scores(schemas, data, "1", '"a"', *"23456789") == [0.0, 1.0, *[0.0] * 8]
    assert scores(schemas, {"schema": True}, "1") == [1.0]


# Calls.


def dry_run(name: str, arguments: dict[str, Any]) -> float:
    return 1 / arguments["n"] if name == "add" else 2.0


TOOLS = {
    "add": {"required": ["n"], "properties": {"n": {"enum": [0, 1, 2]}}},
    "ping": {"maxProperties": 0},
}
ONE, TWO = '{"name": "add", "arguments": {"n": 1}}', '{"name": "add", "arguments": {"n": 2}}'
SUB, NINE = '{"name": "sub", "arguments": {}}', '{"name": "add", "arguments": {"n": 9}}'


def hermes(*calls: str) -> str:
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("data", "right", "wrong", "beyond_repair"),
    [
        ({}, [hermes(ONE), "So: " + hermes(ONE, TWO), ONE, f"[TOOL_CALLS] [{ONE}, {TWO}]",
              ONE.replace("arguments", "parameters"),
              '<|python_tag|>{"name": "ping", "parameters": {}}'],
         ["", "text", "<tool_call>", SUB, '{"n": 1}'],
         [hermes(SUB), hermes(NINE), hermes(ONE, SUB), f"[TOOL_CALLS] [{NINE}]",
          hermes('{"name": "add"}'), "[TOOL_CALLS]{}" + hermes(ONE)]),
        ({"required": False}, ["", "text", '{"n": 1}', hermes(TWO)],
         [ONE[:-1], NINE], [hermes(NINE)]),
        ({"format": "json"}, [ONE], [hermes(ONE)], [SUB, NINE, '{"name": 1}']),
    ],
)  # fmt: skip
def test_calls(
    data: dict[str, Any], right: list[str], wrong: list[str], beyond_repair: list[str]
) -> None:
    reward, data = load("call"), {"tools": TOOLS, **data}
    texts = [*right, *wrong, *beyond_repair]
    assert scores(reward, data, *texts) == [float(text in right) for text in texts]
    prefixes = [text[:end] for text in (*right, *wrong) for end in range(len(text) + 1)]
    if "format" not in data:
        assert min(scores(reward, data, *prefixes, finish=None)) == 1.0
    assert max(scores(reward, data, *beyond_repair, finish=None)) == 0.0


def test_calls_are_tried_by_the_operators_function_once_they_are_final() -> None:
    """Guards against effects of calls that are never returned, and scores beyond 0 .. 1."""
    reward, data = load("call", function=f"{__name__}:dry_run"), {"tools": TOOLS}
    none = ONE.replace("1", "0")  # the function raises
    ping = '{"name": "ping", "arguments": {}}'
    texts = [hermes(TWO), hermes(ping), hermes(ping, TWO), hermes(none), hermes(NINE), "text"]
    assert scores(reward, data, *texts) == [0.5, 1.0, 0.5, 0.0, 0.0, 0.0]
    assert scores(reward, data, *texts[:4], finish=None) == [1.0] * 4
    assert reward.fingerprint != load("call").fingerprint
    with pytest.raises(ValueError, match="function json:nothing"):
        load("call", function="json:nothing")


# Data.


@pytest.mark.parametrize(
    ("kind", "data", "paths"),
    [
        ("answer", "", {"data"}),
        ("answer", '{"answer": ["secret"], "tolerance": "secret"}',
         {"data.answer", "data.tolerance"}),
        ("answer", '{"answer": "secret", "kind": "number"}', {"data.answer"}),
        ("answer", '{"answer": "secret(", "kind": "regex"}', {"data.answer"}),
        ("answer", '{"answer": "a", "extract": "regex:secret(?=a)"}', {"data.extract"}),
        ("answer", '{"answer": "a", "extract": "secret"}', {"data.extract"}),
        ("answer", '{"answer": "a", "kind": "secret", "secret": 1}', {"data.kind", "data"}),
        ("answer", '"secret"', {"data"}),
        ("checks", '{"checks": []}', {"data.checks"}),
        ("call", '{"tools": {}}', {"data.tools"}),
        ("call", '{"tools": {"secret": {"type": "secret"}}}', {"data.tools"}),
        ("checks", '{"checks": [{"id": "secret"}]}', {"data.checks[0].id"}),
        ("checks", '{"checks": [{"id": "punctuation:no_comma", "kwargs": {"secret": 1}}]}',
         {"data.checks[0].kwargs"}),
        ("checks", '{"checks": [{"id": "count:unique_word_count", "kwargs": {"N": "secret"}}]}',
         {"data.checks[0].kwargs.N"}),
        ("checks", '{"checks": [{"id": "keywords:forbidden_words", "kwargs": {"forbidden_words": ["'
         + "\u00e9" * 9**6 + '"]}}]}', {"data.checks[0].kwargs"}),
    ],
)  # fmt: skip
def test_bad_data_is_refused_by_path_and_not_quoted(
    answer: Any, kind: str, data: str, paths: set[str]
) -> None:
    found = violations(answer if kind == "answer" else load(kind), data)
    assert found.keys() == paths
    assert "secret" not in str(found)


def test_equal_texts_are_checked_once_and_too_long_ones_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reward, judged = load("checks"), list[str]()

    def judge(text: str, is_final: bool) -> float:
        judged.append(text)
        return float(is_final)

    monkeypatch.setattr(reward, "prepare", lambda data: judge)
    session = reward.open_with(PROMPT, reward.sample_data)
    final = Candidate(3, "b", 0, 0.0, FinishReason.LENGTH)
    batch = [*as_candidates(["a", "b", "a"]), final]
    assert score_batch(session, reward, batch).values == (0.0, 0.0, 0.0, 1.0)
    assert judged == ["a", "b", "b"]
    monkeypatch.setattr(verifier, "MAX_CHARACTERS", 2)
    long = as_candidates(["abc"], FinishReason.STOP)
    assert score_batch(session, reward, long).values == (0.0,) and "abc" not in judged


def test_missing_libraries_are_named_by_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "find_spec", lambda name: None)
    for kind in ("answer", "schema"):
        with pytest.raises(ValueError, match=r"requires .*specrej-server\[verify\]"):
            load(kind)
    assert load("checks")  # needs none


async def test_over_the_wire_truncated_texts_are_final() -> None:
    """Guards against answers cut off by `max_tokens` that score what they could have become."""
    data = '{"checks": [{"id": "startend:quotation"}]}'
    async with (
        reward_backend(load("checks")) as service,
        channel_to(service) as channel,
        RemoteRewards(channel).open("r", PROMPT, data) as session,
    ):
        ends = (None, FinishReason.STOP, FinishReason.LENGTH)
        candidates = [Candidate(i, '"a', 0, 0.0, finish) for i, finish in enumerate(ends)]
        assert (await session.score(candidates)).values == (1.0, 0.0, 0.0)


def follows(prompt: Prompt, responses: Sequence[str], data: Any) -> list[float]:
    return [float(response == (data or {}).get("reference", "")) for response in responses]


async def test_functions_and_servers_receive_the_data() -> None:
    async with working(lambda: load("function", function=f"{__name__}:follows")) as worker:
        assert worker.description.takes_data
        data = '{"reference": "b"}'
        assert (await worker.score(PROMPT, ["a", "b"], data=data)).values == (0.0, 1.0)
        assert (await worker.score(PROMPT, ["", "b"])).values == (1.0, 0.0)
    async with served() as endpoint:
        reward = load("http", url=endpoint.url)
        try:
            for data in ('{"reference": "b"}', ""):
                await reward.answer(PROMPT, as_candidates(["a"]), data)
        finally:
            await reward.aclose()
        assert [request.body.get("data") for request in endpoint.requests] == [
            {"reference": "b"},
            None,
        ]
        assert "data" not in endpoint.requests[1].body
