"""The toy's scripts: calls that the user names, their results, and reasoning."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from generator_service.toy import ToyGenerator
from specrej import contracts as c
from specrej.answer_form import parts_of
from specrej.contracts.errors import Overloaded
from tests.serving import until

SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
TOOLS = (c.Tool("add", "", json.dumps(SCHEMA)), c.Tool("now"))
ASKED = c.Message("user", 'Please call add {"a": 1} and call now {} then call now {"b": [2]}')


async def answers(*turns: c.Message, **of_prompt: Any) -> list[c.AnswerParts]:
    """What its candidates answer, grown in two rounds, the last of which is a fork's."""
    prompt, n = c.Prompt(turns, **of_prompt), 4
    spec = c.SessionSpec(prompt, n, c.Sampling(200, logprobs=True), 4)
    async with ToyGenerator().open(spec) as session:
        await session.extend(4)
        await session.prune(range(n), {n: 1})
        ended = await session.extend(200)
    made = {one.id: one for one in ended.candidates}
    assert all(one.finish is c.FinishReason.STOP for one in made.values())
    spelled = {token.token_id: token.token.decode() for token in ended.token_texts}
    for one in made.values():
        spelled_text = "".join(spelled[token_id] for token_id in one.new_token_ids)
        assert "".join(one.text.split()).endswith("".join(spelled_text.split()))
    form = session.answer_form
    parts = [parts_of(made[i].text, form, complete=True, candidate=1) for i in range(n + 1)]
    answers = [one or c.AnswerParts(made[i].text) for i, one in enumerate(parts)]
    fork = answers.pop()
    assert not answers[1].tool_calls or fork == answers[1]
    return answers


def calls(parts: c.AnswerParts) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parts.tool_calls]


async def test_it_makes_the_calls_of_each_step_and_answers_with_results() -> None:
    first, second = [("add", '{"a": 1}'), ("now", "{}")], [("now", '{"b": [2]}')]
    made = await answers(ASKED, tools=TOOLS)
    assert [calls(one) for one in made] == [first] * 4
    assert [one.content for one in made] == ["", "Let me see."] * 2
    done = c.Message("assistant", "", (c.ToolCall("x", "now", "{}"),))
    turns = [ASKED, done, c.Message("tool", "sunny", tool_call_id="x")]
    assert [calls(one) for one in await answers(*turns, tools=TOOLS)] == [second] * 4
    # Some callers offer one tool at a time.
    in_turn = replace(ASKED, content='call add {"a": 1} then call now {}')
    assert calls((await answers(in_turn, *turns[1:], tools=TOOLS[1:]))[0]) == [("now", "{}")]
    turns += [done, c.Message("tool", "warm", tool_call_id="x")]
    assert (await answers(*turns, tools=TOOLS))[0].content == "The result is sunny, warm."


async def test_it_follows_the_choice() -> None:
    one = await answers(ASKED, tools=TOOLS, parallel_tool_calls=False)
    assert calls(one[0]) == [("add", '{"a": 1}')]
    named = await answers(ASKED, tools=TOOLS, tool_choice="required", tool_name="now")
    assert [calls(one) for one in named] == [[("now", "{}")]] * 4
    asked = c.Message("user", "Hi")
    required = await answers(asked, tools=TOOLS, tool_choice="required")
    assert calls(required[0]) == [("add", '{"a": 7}')]
    text = await answers(ASKED, tools=TOOLS, tool_choice="none")
    assert not calls(text[0]) and text[0].content


async def test_sessions_wait_for_slots_until_a_cut_or_an_end_frees_them() -> None:
    toy = ToyGenerator(64, max_waiting=2)
    spec = c.SessionSpec(c.Prompt.from_user("x"), 4, c.Sampling(12, ignore_eos=True), 4)
    opened: list[int] = []

    async def one() -> None:
        async with toy.open(spec) as session:
            opened.append(session.id)

    async with toy.open(spec) as first:
        waiting = [asyncio.create_task(one()) for _ in range(2)]
        await until(lambda: len(toy.queue) == 2)
        await first.extend(4)
        assert not opened and (await toy.describe()).waiting == 2
        with pytest.raises(Overloaded):
            async with toy.open(spec):
                pass
        await first.prune([0])
        await waiting[0]
    await waiting[1]
    assert len(opened) == 2 and toy.ledger.num_sessions == 0 == toy.ledger.owned
