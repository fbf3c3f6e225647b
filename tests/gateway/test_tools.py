"""Tools and reasoning of /v1/chat/completions, with the official client and scripted answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from specrej import contracts as c
from specrej.contracts import wire
from tests.gateway.gateways import gateway_at
from tests.gateway.scripted import ALL, CALLS, ONLY_CALLS, ONLY_TEXT, SCHEMA, script
from tests.specrej.fakes import FakeOrchestrator

ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA},
}
FIELDS: dict[str, Any] = {"model": "toy", "messages": ASK, "tools": [TOOL]}


class Weather(BaseModel):
    """Arguments, as the client makes tools of models."""

    city: str


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_at(address) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


def prompt_of(orchestrator: FakeOrchestrator) -> c.Prompt:
    """Of the latest request."""
    return wire.request_from_message(orchestrator.requests[-1], []).prompt


@pytest.mark.parametrize(
    ("parts", "content", "end"),
    [
        (ALL, "Let me see.", "tool_calls"),
        (ONLY_CALLS, None, "tool_calls"),
        (ONLY_TEXT, "the best", "stop"),
        (c.AnswerParts(), "", "stop"),
    ],
)
@pytest.mark.parametrize("num_sent", [0, 3, 7, 9, 13, 1000])
async def test_answers_have_their_parts_whole_and_streamed(
    client: AsyncOpenAI,
    orchestrator: FakeOrchestrator,
    parts: c.AnswerParts,
    num_sent: int,
    content: str | None,
    end: str,
) -> None:
    """Guards against arguments that are sent twice, or not, where the text became certain late."""
    script(orchestrator, parts, num_sent)
    whole = (await client.chat.completions.create(**FIELDS)).choices[0]
    reasoning = ""
    async with client.chat.completions.stream(**FIELDS) as stream:
        async for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    reasoning += getattr(choice.delta, "reasoning_content", "")
        (made,) = (await stream.get_final_completion()).choices
    assert (whole.message.content, whole.finish_reason) == (content, end)
    assert (made.message.content or "", made.finish_reason) == (content or "", end)
    assert reasoning == getattr(whole.message, "reasoning_content", "") == parts.reasoning
    for message in (whole.message, made.message):
        calls: Any = message.tool_calls or []
        found = [c.ToolCall(call.id, call.function.name, call.function.arguments) for call in calls]
        assert tuple(found) == parts.tool_calls


async def test_a_truncated_call_has_no_end_of_its_own(
    client: AsyncOpenAI, orchestrator: FakeOrchestrator
) -> None:
    """Guards agents against a call without its last arguments that looks complete."""
    script(orchestrator, ONLY_CALLS, finish=c.FinishReason.LENGTH)
    assert (await client.chat.completions.create(**FIELDS)).choices[0].finish_reason == "length"


async def test_tools_of_models_are_parsed(
    client: AsyncOpenAI, orchestrator: FakeOrchestrator
) -> None:
    """`parse` with a model of pydantic as the answer and as a tool, and the latter's answer as the
    next request's history."""
    script(orchestrator, c.AnswerParts('{"city":"Oslo"}'))
    whole = await client.chat.completions.parse(model="toy", messages=ASK, response_format=Weather)
    assert whole.choices[0].message.parsed == Weather(city="Oslo")
    script(orchestrator, ONLY_CALLS)
    tool: Any = openai.pydantic_function_tool(Weather, name="weather")
    answer = await client.chat.completions.parse(**FIELDS | {"tools": [tool]})
    message = answer.choices[0].message
    parsed = [call.function.parsed_arguments for call in message.tool_calls or []]
    assert parsed == [Weather(city="Oslo"), Weather(city="Rome")]
    (made,) = prompt_of(orchestrator).tools
    assert (made.name, json.loads(made.parameters)["required"]) == ("weather", ["city"])
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "wet"}]}
        for call in CALLS
    ]
    script(orchestrator, ONLY_TEXT)
    turns: list[Any] = [*ASK, message.model_dump(), *results]
    await client.chat.completions.create(**FIELDS | {"messages": turns})
    assert prompt_of(orchestrator).messages == (
        c.Message("user", "How is the weather?"),
        c.Message("assistant", tool_calls=CALLS),
        *(c.Message("tool", "wet", tool_call_id=call.id) for call in CALLS),
    )
    assert prompt_of(orchestrator).tools == (c.Tool("weather", "Of a city.", json.dumps(
        SCHEMA, separators=(",", ":"))),)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("auto", "", True)),
        ({"tool_choice": "none"}, ("none", "", True)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("required", "", False)),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            ("required", "weather", True),
        ),
        ({"tools": [], "tool_choice": "none"}, ("auto", "", True)),
    ],
)
async def test_choices_of_tools_arrive(
    client: AsyncOpenAI,
    orchestrator: FakeOrchestrator,
    fields: dict[str, Any],
    expected: tuple[str, str, bool],
) -> None:
    await client.chat.completions.create(**FIELDS | fields)
    prompt = prompt_of(orchestrator)
    assert (prompt.tool_choice, prompt.tool_name, prompt.parallel_tool_calls) == expected


@pytest.mark.parametrize(
    ("fields", "thinking", "bound"),
    [
        ({}, None, 0),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, True, 0),
        ({"extra_body": {"chat_template_kwargs": {"thinking": False, "x": 1}}}, False, 0),
        ({"reasoning_effort": "none"}, False, 0),
        ({"reasoning_effort": "high", "extra_body": {"max_thinking_tokens": 32}}, None, 32),
    ],
)
async def test_reasoning_is_chosen_and_bounded(
    client: AsyncOpenAI,
    orchestrator: FakeOrchestrator,
    fields: dict[str, Any],
    thinking: bool | None,
    bound: int,
) -> None:
    reply: Any = await client.chat.completions.with_raw_response.create(**FIELDS | fields)
    assert prompt_of(orchestrator).thinking is thinking
    assert orchestrator.requests[-1].sampling.max_thinking_tokens == bound
    ignored = reply.headers.get("x-specrej-ignored", "")
    assert ("reasoning_effort" in ignored) == (fields.get("reasoning_effort") == "high")
    assert ("x" in ignored.split(", ")) == ("'x'" in str(fields))
