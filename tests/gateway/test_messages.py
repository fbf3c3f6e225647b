"""/v1/messages with Anthropic's client and scripted answers, and the table of its fields."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from gateway.fields import OutputConfig, ResponseFormat, SchemaFormat, parsed
from gateway.messages import ContentBlock, MessagesRequest, Thinking, Tool, ToolChoice, Turn
from gateway.requests import call_of
from specrej import contracts as c
from specrej.contracts.errors import Overloaded, SpecrejError, Unavailable
from tests.gateway.gateways import gateway_at, post, tokens_file
from tests.gateway.scripted import ALL, CALLS, ONLY_CALLS, ONLY_TEXT, SCHEMA, known, script
from tests.gateway.test_tools import prompt_of
from tests.serving import listening
from tests.specrej.fakes import FakeOrchestrator

ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
TOOL: Any = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
FIELDS: dict[str, Any] = {"model": "toy", "max_tokens": 64, "messages": ASK, "tools": [TOOL]}


def sdk() -> Any:
    """Anthropic's client. To import it takes seconds, in each process of the tests."""
    return pytest.importorskip("anthropic", reason="Anthropic's client is not installed")


def client_at(port: int, **arguments: Any) -> Any:
    arguments = arguments or {"api_key": "none"}
    return sdk().AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", max_retries=0, **arguments)


@pytest.fixture
async def client(address: str) -> AsyncIterator[Any]:
    async with gateway_at(address) as server, client_at(server.port) as client:
        yield client


def call(**fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 9, "messages": ASK, **fields}
    return call_of(parsed(MessagesRequest, json.dumps(body).encode()), {})


def expected(parts: c.AnswerParts) -> list[Any]:
    made: list[Any] = []
    if parts.reasoning:
        made.append({"type": "thinking", "thinking": parts.reasoning, "signature": ""})
    if parts.content:
        made.append({"type": "text", "text": parts.content})
    calls = [(call.id, call.name, json.loads(call.arguments)) for call in parts.tool_calls]
    return made + [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in calls]


def shown(message: Any) -> list[Any]:
    return [block.to_dict() for block in message.content]


@pytest.mark.parametrize("parts", [ALL, ONLY_CALLS, ONLY_TEXT, c.AnswerParts()])
@pytest.mark.parametrize("num_sent", [0, 3, 7, 13, 1000])
async def test_events_have_the_whole_message(
    client: Any, orchestrator: FakeOrchestrator, parts: c.AnswerParts, num_sent: int
) -> None:
    """Guards the order of events, on which the client's own accumulation depends."""
    script(orchestrator, parts, num_sent)
    arguments, kinds = "", []
    async with client.messages.stream(**FIELDS) as stream:
        async for event in stream:
            kinds.append(event.type)
            if event.type == "input_json":
                arguments += event.partial_json
        final = await stream.get_final_message()
    assert arguments == "".join(call.arguments for call in parts.tool_calls)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    whole = await client.messages.create(**FIELDS)
    assert shown(final) == shown(whole) == expected(parts)
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    assert whole.stop_reason == ("tool_use" if parts.tool_calls else "end_turn")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (9, 3)
    assert (whole.id, whole._request_id) == ("msg_r1", "r1")


async def test_a_cut_call_has_an_input(client: Any, orchestrator: FakeOrchestrator) -> None:
    """Guards against an internal error for arguments that the end of the tokens has cut."""
    cut = c.AnswerParts(tool_calls=(c.ToolCall("1", "weather", '{"city":"Os'),))
    script(orchestrator, cut, finish=c.FinishReason.LENGTH)
    message = await client.messages.create(**FIELDS)
    assert (message.content[0].input, message.stop_reason) == ({}, "max_tokens")


async def test_a_stop_text_is_named(client: Any, orchestrator: FakeOrchestrator) -> None:
    script(orchestrator, ONLY_TEXT, stop_text="###")
    whole = await client.messages.create(**FIELDS)
    async with client.messages.stream(**FIELDS) as stream:
        final = await stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "###")


async def test_answers_become_turns(client: Any, orchestrator: FakeOrchestrator) -> None:
    """Guards against results before their calls, and reasoning that is sent as text."""
    script(orchestrator, ALL)
    answer = await client.messages.create(**FIELDS)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "wet", "is_error": is_error}
        for call, is_error in zip(CALLS, (False, True), strict=True)
    ]
    last = {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]}
    turns = [*ASK, {"role": "assistant", "content": answer.content}, last]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    await client.messages.create(**FIELDS | {"messages": turns}, system=system)
    assert prompt_of(orchestrator).messages == (
        c.Message("system", "Be brief."),
        c.Message("user", "How is the weather?"),
        c.Message("assistant", "Let me see.", CALLS),
        c.Message("tool", "wet", tool_call_id=CALLS[0].id),
        c.Message("tool", "Error: wet", tool_call_id=CALLS[1].id),
        c.Message("user", "Well?"),
    )


@pytest.mark.parametrize("headers", [{"api_key": "red"}, {"auth_token": "red"}])
async def test_keys_are_tokens(
    orchestrator: FakeOrchestrator, tmp_path: Path, headers: dict[str, str]
) -> None:
    path = tokens_file(tmp_path, "red")
    async with (
        listening(orchestrator.service(), tokens_file=path) as address,
        gateway_at(address, allow_anonymous=False) as server,
    ):
        async with client_at(server.port, **headers) as client:
            assert (await client.messages.create(**FIELDS)).content
        async with client_at(server.port, api_key="blue") as client:
            with pytest.raises(sdk().AuthenticationError):
                await client.messages.create(**FIELDS)
        both = {"authorization": "Bearer red", "x-api-key": "red"}
        status, _, body = await post(server.port, "/v1/messages", FIELDS, **both)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
    assert orchestrator.tenants == ["red"]


@pytest.mark.parametrize(
    ("failure", "kind", "status"),
    [
        (Overloaded("full", retry_after_s=1), "rate_limit_error", 429),
        (Unavailable("away", retry_after_s=0.01), "overloaded_error", 503),
        (None, "invalid_request_error", 400),
    ],
)
async def test_errors_have_anthropics_form(
    client: Any,
    orchestrator: FakeOrchestrator,
    failure: SpecrejError | None,
    kind: str,
    status: int,
) -> None:
    orchestrator.failures += [failure] * 8 if failure else []
    changes = {} if failure else {"top_k": -5}
    with pytest.raises(sdk().APIStatusError) as failed:
        await client.messages.create(**FIELDS, extra_body=changes)
    assert failed.value.status_code == status
    assert failed.value.body["type"] == "error"
    assert failed.value.body["error"]["type"] == kind
    assert failure or failed.value.body["error"]["message"].startswith("top_k: must be")


async def test_a_failure_in_mid_stream(client: Any, orchestrator: FakeOrchestrator) -> None:
    script(orchestrator, ONLY_TEXT)
    orchestrator.events = orchestrator.events[:2]
    orchestrator.after_events = Unavailable("away", retry_after_s=0.01)
    with pytest.raises(sdk().APIError, match="overloaded_error"):
        async for _ in await client.messages.create(**FIELDS, stream=True):
            pass


def test_every_field_of_the_official_types_has_a_rule() -> None:
    types = sdk().types
    blocks = ("Text", "Image", "ToolUse", "ToolResult", "Thinking", "RedactedThinking")
    rules: list[tuple[Any, Any]] = [
        (get_args(types.message_create_params.MessageCreateParams), MessagesRequest),
        (get_args(types.MessageParam) or [types.MessageParam], Turn),
        ([getattr(types, f"{name}BlockParam") for name in blocks], ContentBlock),
        ([types.ToolParam], Tool),
        (get_args(types.ToolChoiceParam), ToolChoice),
        (get_args(types.ThinkingConfigParam), Thinking),
        ([types.OutputConfigParam], OutputConfig),
    ]
    for kinds, model in rules:
        for kind in kinds:
            assert get_type_hints(kind).keys() <= known(model), kind
    names = get_type_hints(types.JSONOutputFormatParam).keys()
    assert names <= known(ResponseFormat) | known(SchemaFormat)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("auto", "", True, None)),
        ({"tool_choice": {"type": "any"}}, ("required", "", True, None)),
        ({"tool_choice": {"type": "none"}}, ("none", "", True, None)),
        (
            {"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            ("required", "f", False, None),
        ),
        ({"thinking": {"type": "disabled"}}, ("auto", "", True, False)),
        ({"thinking": {"type": "adaptive"}}, ("auto", "", True, None)),
        ({"thinking": {"type": "enabled", "budget_tokens": 32}}, ("auto", "", True, True)),
    ],
)
def test_choices_and_reasoning_arrive(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    made = call(**fields, tools=[{"name": "f", "input_schema": {}}])
    prompt = made.prompt
    found = (prompt.tool_choice, prompt.tool_name, prompt.parallel_tool_calls, prompt.thinking)
    assert found == expected
    assert made.options.get("max_thinking_tokens", 0) == (32 if expected[3] else 0)
    assert made.name_of("sampling.max_thinking_tokens") == (
        "thinking.budget_tokens" if expected[3] else "specrej.max_thinking_tokens"
    )


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    """Guards against an answer that begins anew: Anthropic's clients send its beginning."""
    turns = [*ASK, {"role": "assistant", "content": "It is"}]
    assert (call().prompt.beginning, call(messages=turns).prompt.beginning) == ("", "It is")


def test_options_and_names_of_errors() -> None:
    made = call(
        system="x", temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["a"],
        output_config={"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
    )  # fmt: skip
    del made.options["seed"], made.options["cache"]
    assert made.options == c.Options(
        model="m", max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, stop=["a"],
        structured_output=c.JsonSchema("{}"),
    )  # fmt: skip
    assert made.name_of("prompt.messages[1].content") == "messages[0].content"
    assert made.name_of("sampling.stop[0]") == "stop_sequences[0]"
