"""The loop with answers that have parts: calls, and reasoning before them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.edge.calls import CallChecks
from orchestrator.loop.progress import WithinRounds
from specrej import contracts as c
from specrej.contracts.errors import DeadlineExceeded, InvalidRequest
from tests.orchestrator.caching import Clock
from tests.orchestrator.runs import FixedScorer, answer, request

HERMES = c.AnswerForm("hermes")
THINKING = c.AnswerForm(thinking_begin="<think>", thinking_end="</think>")
SLOTS = c.SlotGauge(1000, 1, 1)
ADD = c.Tool("add", parameters='{"type": "object", "properties": {"n": {"type": "integer"}},'
           ' "required": ["n"], "additionalProperties": false}')  # fmt: skip
PING = c.Tool("ping")
EVERY_8 = c.Schedule("tokens", tokens=tuple(range(8, 400, 8)))
BEST_OF_N = c.Algorithm.BEST_OF_N


class Scripted:
    """A generator whose candidates write these texts, a character per token."""

    def __init__(self, form: c.AnswerForm, *texts: str, full_at: int = 0) -> None:
        self.answer_form, self._texts, self._full_at = form, texts, full_at
        self.prompt_tokens, self.reduced = 1, False
        self.fingerprint, self.costly_rounds = "", False
        self.clock = Clock()

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[Scripted]:
        self.n, self.max_tokens, self._position = spec.n, spec.sampling.max_tokens, 0
        self._live = {*range(spec.n)}
        self.is_open = True
        try:
            yield self
        finally:
            self.is_open = False

    async def extend(self, until_tokens: int, report: c.Report | None = None) -> c.Round:
        live, until = sorted(self._live), min(until_tokens, self.max_tokens)
        ended_by = c.RoundEnd.DECISION_TOKEN
        if self._position < self._full_at <= until and len(live) > 1:
            until, ended_by = self._full_at, c.RoundEnd.SLOTS_FULL
        if report and len(live) == 1:
            for position in range(self._position + 1, until):
                if (grown := self._candidate(live[0], position)).finish is None:
                    report(c.Round((grown,), ended_by, position, SLOTS, num_live=1))
        self.clock.now_s += 0.01 * (until - self._position)
        self._position = until
        candidates = tuple(self._candidate(number, until) for number in live)
        self._live = {one.id for one in candidates if not one.finish}
        ended_by = ended_by if self._live else c.RoundEnd.ALL_FINISHED
        return c.Round(candidates, ended_by, until, SLOTS)

    def _candidate(self, number: int, position: int) -> c.Candidate:
        text = self._texts[number]
        finish, stop = None, ""
        if position >= self.max_tokens:
            finish = c.FinishReason.LENGTH
        if position > len(text):  # a token ends it
            finish, stop = c.FinishReason.STOP, "\n"
        num_tokens = min(position, len(text) + 1)
        return c.Candidate(number, text[:position], num_tokens, -1.0, finish, stop_text=stop)

    async def prune(self, keep: Collection[int], forks: c.Forks = c.NO_FORKS) -> c.Pruned:
        freed, self._live = len(self._live) - len(keep), {*keep}
        return c.Pruned(freed, SLOTS)


def call(name: str, arguments: object = "{}") -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


CHECKS = CallChecks()


async def answer_of(
    form: c.AnswerForm,
    *texts: str,
    tools: Sequence[c.Tool] = (),
    prompt: Any = None,
    **options: Any,
) -> c.Generation:
    of: dict[str, Any] = {**(prompt or {}), "tools": tuple(tools)}
    options = dict[str, Any](algorithm=BEST_OF_N) | options
    asked = replace(c.Prompt.from_user("?"), **of)
    run_options: dict[str, Any] = {
        key: options.pop(key) for key in ("extract", "within", "time_left_s") if key in options
    }
    scorer = options.pop("scorer", FixedScorer())
    generator: Any = Scripted(form, *texts, full_at=options.pop("full_at", 0))
    if "time_left_s" in run_options:
        run_options["clock"] = generator.clock
    wanted = replace(request(len(texts), options.pop("max_tokens", 400), **options), prompt=asked)
    checks = await CHECKS.of(asked, "a")
    try:
        return await answer(wanted, generator, scorer, are_valid=checks, **run_options)
    finally:
        assert not generator.is_open


@pytest.mark.parametrize(
    ("invalid", "prompt"),
    [
        (call("sub", {"n": 1}), {}),
        (call("add", {"n": "one"}), {}),
        (call("add", {"n": 1, "m": 2}), {}),
        (call("ping", {"n": 1}), {}),
        (call("add", '{"n": 1'), {}),
        ("Let me see. <tool_call>", {}),
        ("Just a long text, and no call.", {"tool_choice": "required"}),
        (call("ping") + call("ping"), {"tool_choice": "required", "tool_name": "add"}),
        (call("add", {"n": 1}) + call("ping"), {"parallel_tool_calls": False}),
    ],
)
async def test_invalid_answers_never_beat_valid_ones(invalid: str, prompt: dict[str, Any]) -> None:
    """Guards against calls that the caller's program cannot make, though a reward likes them."""
    valid = call("add", {"n": 1})
    longest = FixedScorer(lambda made: float(len(made.text)) if made.text != valid else -1.0)
    options: dict[str, Any] = {"tools": (ADD, PING), "prompt": prompt, "scorer": longest}
    generation = await answer_of(HERMES, invalid + " ", valid, **options)
    assert [(one.id, one.vetoed) for one in generation.candidates] == [(1, False), (0, True)]
    best, other = (one.parts for one in generation.candidates)
    assert best == c.AnswerParts("", "", (c.ToolCall("call_1_0", "add", '{"n": 1}'),))
    assert other and not other.tool_calls and other.content.strip() == invalid.strip()
    # Alone it is returned as a text, as other answers are if all are vetoed.
    alone = await answer_of(HERMES, invalid, **options)
    assert alone.best.vetoed and alone.best.parts == replace(other, content=invalid)


async def test_a_text_is_valid_unless_a_call_is_required() -> None:
    tools = {"tools": (ADD,)}
    generation = await answer_of(HERMES, "no call", call("add", {"n": 1}), **tools)
    assert not any(one.vetoed for one in generation.candidates)
    texts = {one.id: one.parts for one in generation.candidates}
    assert texts[0] == c.AnswerParts("no call")
    none = await answer_of(
        HERMES, "no call", call("add", {"n": 1}), prompt={"tool_choice": "none"}, **tools
    )
    assert none.best.id == 0 and none.candidates[1].vetoed


def slow_tool() -> c.Tool:
    """Its schema doubles the work with every reference."""
    definitions: dict[str, Any] = {"0": {"type": "string"}}
    for n in range(40):
        definitions[str(n + 1)] = {"anyOf": [{"$ref": f"#/$defs/{n}"}] * 2}
    schema = {"$defs": definitions, "properties": {"n": {"$ref": "#/$defs/40"}}}
    return c.Tool("slow", parameters=json.dumps(schema))


async def test_a_tenant_with_hostile_schemas_does_not_delay_others() -> None:
    checks = CallChecks()

    async def is_valid(tenant: str, tool: c.Tool) -> bool:
        are_valid = await checks.of(replace(c.Prompt.from_user("?"), tools=(tool,)), tenant)
        return await are_valid(c.AnswerParts(tool_calls=(c.ToolCall("x", tool.name, '{"n": 1}'),)))

    assert not await is_valid("hostile", slow_tool())
    assert await is_valid("usual", ADD)  # its process has started again
    hostile = asyncio.create_task(is_valid("hostile", slow_tool()))
    usual = asyncio.create_task(is_valid("usual", ADD))
    await asyncio.wait({hostile, usual}, return_when=asyncio.FIRST_COMPLETED)
    assert usual.done() and usual.result() and not hostile.done()
    assert not await hostile


async def test_hostile_schemas_cost_a_bounded_time_and_veto() -> None:
    """Guards the orchestrator against schemas that double their work with every reference."""
    tool = slow_tool()
    texts = [call("slow", {"n": n}) for n in range(7)]
    generation = await answer_of(HERMES, *texts, call("slow", {"n": "a"}), tools=(tool,))
    assert all(one.vetoed for one in generation.candidates)  # of the last one, it is not tried
    assert not (await answer_of(HERMES, call("slow", {}), tools=(tool,))).best.vetoed
    with pytest.raises(InvalidRequest, match=r"prompt.tools\[1\].parameters: must be a JSON Sch"):
        await answer_of(HERMES, "", tools=(ADD, c.Tool("bad", parameters='{"type": "secret"}')))


async def test_rewards_and_votes_read_the_answer_and_not_the_reasoning() -> None:
    """Guards against a reward that likes long reasoning, and votes by numbers in it."""
    texts = ["<think>a very long 7 thought</think>no", "<think>7</think>the answer is 8"]
    longest = await answer_of(THINKING, *texts)
    assert longest.best.id == 1 and longest.best.score == len("the answer is 8")
    assert longest.best.parts == c.AnswerParts("the answer is 8", "7")
    assert longest.best.stop_text == "\n"
    assert (await answer_of(THINKING, *texts, score_thinking=True)).best.id == 0
    seen: list[str] = []
    await answer_of(THINKING, *texts, vote=c.Vote(), extract=seen.append, score_thinking=True)
    assert sorted(seen) == ["no", "the answer is 8"]


async def test_reasoning_without_an_answer_counts_as_vetoed() -> None:
    """Guards against empty answers, which some rewards like best."""
    shortest = FixedScorer(lambda made: -float(len(made.text)))
    texts = ["<think>" + "hm " * 40, "<think>hm</think>long answer"]
    generation = await answer_of(THINKING, *texts, scorer=shortest, max_tokens=60)
    assert [(one.id, one.vetoed) for one in generation.candidates] == [(1, False), (0, True)]


@pytest.mark.parametrize("is_spared", [False, True])
async def test_cuts_leave_alone_who_still_reasons(is_spared: bool) -> None:
    """Guards against cuts of texts that no reward has read."""
    scored: list[str] = []

    def last_letter(candidate: c.Candidate) -> float:
        scored.append(candidate.text)
        return float(ord(candidate.text[-1])) if candidate.text else 0.0

    texts = ["<think>ok</think>" + letter * 60 for letter in "abcd"]
    texts += ["<think>" + "hm " * 9 + "</think>" + "z" * 30] * 2
    options: dict[str, Any] = {"algorithm": c.Algorithm.SPECULATIVE_REJECTION}
    options |= {"schedule": EVERY_8, "score_thinking": not is_spared}
    generation = await answer_of(THINKING, *texts, scorer=FixedScorer(last_letter), **options)
    assert any("<think>" in text for text in scored) is not is_spared
    assert (generation.best.id == 4) is is_spared
    if is_spared:  # of the four that answer by then, half
        third = generation.rounds[2]
        assert (third.num_rejected, third.num_live) == (2, 4)


async def test_cuts_of_reasoning_alone_reject_none_unless_slots_are_full() -> None:
    """Guards against a division by no ranked candidates, and a run that never ends."""
    texts = ["<think>" + "hm " * 30 + "</think>yes"] * 4
    options: dict[str, Any] = {"algorithm": c.Algorithm.SPECULATIVE_REJECTION}
    options |= {"schedule": EVERY_8}
    generation = await answer_of(THINKING, *texts, **options)
    first = [trace for trace in generation.rounds if trace.decision_token < 90]
    assert first and not any(trace.num_rejected for trace in first)
    full = await answer_of(THINKING, *texts, full_at=30, **options)
    assert full.rounds[3].ended_by is c.RoundEnd.SLOTS_FULL and full.rounds[3].num_rejected > 0
    hurried = await answer_of(THINKING, *texts, time_left_s=10_000.0, **options)
    assert hurried.best.parts == c.AnswerParts("yes", ("hm " * 30).strip())


@pytest.mark.parametrize("extractor", ["tool_call", "regex"])
async def test_calls_vote_by_name_and_arguments_and_texts_together(extractor: Any) -> None:
    """Guards votes that spellings of JSON or of an explanation split."""
    texts = [
        call("add", '{"n":  1}'),
        "I shall add. " + call("add", '{"n": 1.0}'),
        call("add", {"n": 2}),
        call("ping"),
        call("ping") + call("add", {"n": 1}),
        "one text",
        "another text",
        "a third text",
    ]
    vote = c.Vote(
        extractor, "x" if extractor == "regex" else "", "reward"
    )  # which never ends early
    generation = await answer_of(
        HERMES, *texts, tools=(ADD, PING), vote=vote, extract=lambda text: text[-4:],
        scorer=FixedScorer(lambda made: 1.0),
    )  # fmt: skip
    votes = {share.answer: share.count for share in generation.votes}
    if extractor == "regex":
        assert votes == {"all>": 5, "text": 3}
        return
    assert votes == {
        "text": 3,
        '{"arguments":{"n":1},"name":"add"}': 2,
        '{"arguments":{"n":2},"name":"add"}': 1,
        '{"arguments":{},"name":"ping"}': 1,
        '[{"arguments":{},"name":"ping"},{"arguments":{"n":1},"name":"add"}]': 1,
    }
    early = await answer_of(
        HERMES, *texts[:1] * 3, "x" * 200, tools=(ADD,), vote=c.Vote("tool_call")
    )
    assert (early.stopped_by, early.best.id) == (c.StopReason.VOTE, 0)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("<think>I call.</think>Now: " + call("add", {"n": 1}) + " done", True),
        ("<think>I call.</think>Now: " + call("sub", {"n": 1}) + " done", False),
        ("<think>I call.</think>Now: " + call("add", {"n": 1}) + call("add"), False),
        ("<think>I call.</think>Now: <tool_call>x", False),
        ("no parts but this  ", True),
    ],
)
async def test_streamed_parts_are_those_of_the_answer(text: str, is_valid: bool) -> None:
    """Guards against a call that is streamed and then refused, and against text sent twice."""
    form = replace(HERMES, thinking_begin="<think>", thinking_end="</think>")
    within: list[c.Progress | c.TextDelta] = []
    options: dict[str, Any] = {"within": WithinRounds(within.append), "schedule": EVERY_8}
    generation = await answer_of(form, text, tools=(ADD,), **options)
    deltas = [event for event in within if isinstance(event, c.TextDelta)]
    parts = [delta.parts for delta in deltas if delta.parts]
    assert len(parts) == len(deltas) > len(text) / 2
    assert "".join(delta.text for delta in deltas) == text
    best = generation.best
    assert best.parts and best.vetoed is not is_valid
    assert "".join(part.content for part in parts) == best.parts.content
    assert "".join(part.reasoning for part in parts) == best.parts.reasoning
    calls = [call for part in parts for call in part.tool_calls]
    expected = enumerate(best.parts.tool_calls)
    assert calls == [c.ToolCallDelta(n, made.id, made.name, made.arguments) for n, made in expected]
    assert bool(calls) is (is_valid and "call" in text)


async def test_a_call_that_the_deadline_cuts_short_is_no_call() -> None:
    text = call("add", {"n": 1}) * 4
    options: dict[str, Any] = {"tools": (ADD,), "schedule": EVERY_8, "time_left_s": 1.5}
    with pytest.raises(DeadlineExceeded):
        await answer_of(HERMES, text, **options)
    late = await answer_of(HERMES, text, allow_degraded=True, **options)
    assert late.best.finish is c.FinishReason.LENGTH and late.best.vetoed
    assert late.best.parts and not late.best.parts.tool_calls


async def test_a_bound_of_reasoning_needs_its_marks() -> None:
    options: dict[str, Any] = {"sampling": {"max_thinking_tokens": 8}}
    with pytest.raises(InvalidRequest, match="max_thinking_tokens: must be 0: the model does not"):
        await answer_of(HERMES, "text", **options)
    assert (await answer_of(THINKING, "text", **options)).best.text == "text"
