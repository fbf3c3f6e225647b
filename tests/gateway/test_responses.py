"""/v1/responses with the official client and scripted answers, and the table of its fields."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from gateway.fields import parsed
from gateway.requests import call_of
from gateway.responses import ResponsesRequest
from specrej import contracts as c
from specrej.contracts.errors import Unavailable
from tests.gateway.scripted import ALL, CALLS, ONLY_CALLS, ONLY_TEXT, SCHEMA, script
from tests.gateway.test_tools import Weather, client, prompt_of
from tests.specrej.fakes import FakeOrchestrator

__all__ = ["client"]  # a fixture

TOOL: Any = {
    "type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA,
    "strict": True,
}  # fmt: skip
FIELDS: dict[str, Any] = {"model": "toy", "input": "How is the weather?", "tools": [TOOL]}


def call(**fields: Any) -> Any:
    body = {"model": "m", "input": "x", **fields}
    return call_of(parsed(ResponsesRequest, json.dumps(body).encode()), {})


def shown(response: Any) -> list[Any]:
    """The kinds and contents of the items of an answer."""
    items: list[Any] = []
    for item in response.output:
        if item.type == "function_call":
            items.append((item.call_id, item.name, item.arguments))
        else:
            items.append((item.type, "".join(part.text for part in item.content)))
    return items


def expected(parts: c.AnswerParts) -> list[Any]:
    texts = [("reasoning", parts.reasoning), ("message", parts.content)]
    calls = [(call.id, call.name, call.arguments) for call in parts.tool_calls]
    return [*(item for item in texts if item[1]), *calls]


@pytest.mark.parametrize("parts", [ALL, ONLY_CALLS, ONLY_TEXT, c.AnswerParts()])
@pytest.mark.parametrize("num_sent", [0, 3, 7, 13, 1000])
async def test_events_have_the_whole_response(
    client: AsyncOpenAI, orchestrator: FakeOrchestrator, parts: c.AnswerParts, num_sent: int
) -> None:
    """Guards the order of events, on which the client's own accumulation depends."""
    script(orchestrator, parts, num_sent)
    deltas, numbers = "", []
    async with client.responses.stream(**FIELDS) as stream:
        async for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.function_call_arguments.delta":
                deltas += event.delta
            elif event.type == "response.output_text.done":
                assert event.text == parts.content
        final = await stream.get_final_response()
    assert numbers == [*range(len(numbers))]
    assert deltas == "".join(call.arguments for call in parts.tool_calls)
    whole = await client.responses.create(**FIELDS)
    assert shown(final) == shown(whole) == expected(parts)
    assert [item.id for item in final.output] == [item.id for item in whole.output]
    assert (whole.id, whole.status, whole.output_text) == ("resp_r1", "completed", parts.content)
    assert whole.usage and whole.usage.total_tokens == 12 and whole.usage == final.usage
    reasoning = whole.usage.output_tokens_details.reasoning_tokens
    assert reasoning == (1 if parts is ALL else 0), "12 of 67 characters, of 3 tokens"
    script(orchestrator, parts, finish=c.FinishReason.LENGTH)
    cut = await client.responses.create(**FIELDS)
    assert cut.status == "incomplete" and cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"


async def test_answers_become_turns(client: AsyncOpenAI, orchestrator: FakeOrchestrator) -> None:
    """A tool of pydantic, and its answer with all items as the next request's input."""
    script(orchestrator, ALL)
    tool = openai.pydantic_function_tool(Weather, name="weather")
    response = await client.responses.parse(**FIELDS | {"tools": [tool]})
    made = [item.parsed_arguments for item in response.output if item.type == "function_call"]
    assert made == [Weather(city="Oslo"), Weather(city="Rome")]
    given: list[Any] = [{"role": "user", "content": "How is the weather?"}, *response.output]
    given += [
        {"type": "function_call_output", "call_id": call.id, "output": "wet"} for call in CALLS
    ]
    await client.responses.create(**FIELDS | {"input": given}, instructions="Be brief.")
    assert prompt_of(orchestrator).messages == (
        c.Message("system", "Be brief."),
        c.Message("user", "How is the weather?"),
        c.Message("assistant", "Let me see.", CALLS),
        *(c.Message("tool", "wet", tool_call_id=call.id) for call in CALLS),
    )


async def test_a_failure_in_mid_stream_is_an_exception(
    client: AsyncOpenAI, orchestrator: FakeOrchestrator
) -> None:
    script(orchestrator, ONLY_TEXT)
    orchestrator.events = orchestrator.events[:2]
    orchestrator.after_events = Unavailable("away", retry_after_s=0.01)
    with pytest.raises(openai.APIError) as failed:
        async for _ in await client.responses.create(**FIELDS, stream=True):
            pass
    assert failed.value.code == "unavailable"


def test_options_and_names_of_errors() -> None:
    made = call(
        max_output_tokens=9, temperature=0.5, top_p=0.9, reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "a", "schema": {}}}, tools=[TOOL],
        instructions="x", tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False, specrej={"n": 3},
    )  # fmt: skip
    del made.options["seed"], made.options["cache"]
    assert made.options == c.Options(
        model="m", max_tokens=9, temperature=0.5, top_p=0.9, n=3,
        structured_output=c.JsonSchema("{}"),
    )  # fmt: skip
    prompt = made.prompt
    assert (prompt.tool_choice, prompt.tool_name) == ("required", "weather")
    assert (prompt.parallel_tool_calls, prompt.thinking) == (False, False)
    assert made.name_of("prompt.messages[1].content") == "input[0].content"
    assert made.name_of("prompt.messages[0].content") == "instructions.content"
    assert made.name_of("sampling.max_tokens") == "max_output_tokens"
    assert made.name_of("prompt.tools[0].name") == "tools[0].name"
