"""The table of fields: complete for the official client's request types, and as documented."""

from __future__ import annotations

import json
import math
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import chat as chat_types
from openai.types import completion_create_params as completion_params
from openai.types import responses, shared_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from openai.types.responses import response_format_text_config_param
from openai.types.responses import response_input_item_param as item_params

from gateway import fields
from gateway.messages import MessagesRequest
from gateway.requests import (
    MAX_LOGPROBS,
    ChatCall,
    ChatMessage,
    ChatRequest,
    ChatTool,
    CompletionRequest,
    call_of,
)
from gateway.responses import Item, Reasoning, ResponsesRequest, ResponseTool
from gateway.settings import GatewaySettings
from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest, Violation
from tests.gateway.scripted import known

TABLE = fields.rules_of(CompletionRequest) | fields.rules_of(ChatRequest)
PRESETS = GatewaySettings().presets
OUTPUTS: list[tuple[str, Any, Any]] = [
    ("json", {"type": "object"}, c.JsonSchema('{"type":"object"}')),
    ("json", "{}", c.JsonSchema("{}")),
    ("regex", "a+", c.Regex("a+")),
    ("choice", ["a.b", "c d"], c.Regex(r"a\.b|c\ d")),
    ("grammar", 'start: "a"', c.Grammar('start: "a"')),
    ("json_object", True, c.JsonObject()),
]


# The least request of each endpoint.
ASK = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
F = [{"type": "function", "function": {"name": "f"}}]
BODIES: dict[Any, dict[str, Any]] = {
    ChatRequest: ASK,
    CompletionRequest: {"model": "m", "prompt": "x"},
    ResponsesRequest: {"model": "m", "input": "x"},
    MessagesRequest: {**ASK, "max_tokens": 9},
}


def made(model: Any, /, **given: Any) -> Any:
    return fields.parsed(model, json.dumps({**BODIES[model], **given}).encode())


def chat(**given: Any) -> Any:
    return made(ChatRequest, **given)


def violations(**given: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as refused:
        call_of(chat(**given), PRESETS)
    return {violation.field: violation.description for violation in refused.value.violations}


def official(package: Any, *names: str) -> tuple[Any, ...]:
    """Types of the official client, and the parts of those that are unions."""
    kinds = (getattr(package, name) for name in names)
    return tuple(part for kind in kinds for part in get_args(kind) or (kind,))


TEXTS = response_format_text_config_param
OFFICIAL: list[tuple[tuple[Any, ...], set[str]]] = [
    (official(chat_params, "CompletionCreateParams"), {*fields.rules_of(ChatRequest)}),
    (official(completion_params, "CompletionCreateParams"), {*fields.rules_of(CompletionRequest)}),
    (official(chat_types, "ChatCompletionMessageParam"), known(ChatMessage)),
    (official(chat_types, "ChatCompletionContentPartTextParam"), {*fields.PART_FIELDS}),
    (official(chat_types, "ChatCompletionFunctionToolParam"), known(ChatTool)),
    (official(shared_params, "FunctionDefinition"), known(fields.Function)),
    (official(chat_types, "ChatCompletionMessageFunctionToolCallParam"), known(ChatCall)),
    (official(chat_types, "ChatCompletionStreamOptionsParam"), known(fields.StreamOptions)),
    (official(chat_params, "ResponseFormat"), known(fields.ResponseFormat)),
    (
        (get_type_hints(shared_params.ResponseFormatJSONSchema)["json_schema"],),
        known(fields.SchemaFormat),
    ),
    (official(response_params, "ResponseCreateParams"), known(ResponsesRequest)),
    (official(item_params, "Message", "FunctionCallOutput"), known(Item)),
    (
        official(
            *(responses, "EasyInputMessageParam", "ResponseOutputMessageParam"),
            "ResponseFunctionToolCallParam",
        ),
        known(Item),
    ),
    (official(responses, "ResponseInputTextParam"), {*fields.PART_FIELDS}),
    (official(responses, "FunctionToolParam"), known(ResponseTool)),
    (official(shared_params, "Reasoning"), known(Reasoning)),
    (official(responses, "ResponseTextConfigParam"), known(fields.OutputConfig)),
    (
        official(TEXTS, "ResponseFormatTextConfigParam"),
        known(fields.ResponseFormat) | known(fields.SchemaFormat),
    ),
    (official(response_params, "StreamOptions"), known(fields.StreamOptions)),
]


@pytest.mark.parametrize(("kinds", "names"), OFFICIAL)
def test_every_field_of_the_official_types_has_a_rule(kinds: Any, names: set[str]) -> None:
    """Guards against a field that a new client sends and that is refused as unknown."""
    for kind in kinds:
        assert get_type_hints(kind).keys() <= names, kind


def rules(kind: type[Any]) -> list[Any]:
    """The fields of all endpoints with a rule of that kind: the request, name and rule."""
    pairs = ((model, fields.rules_of(model).items()) for model in BODIES)
    return [(model, n, rule) for model, items in pairs for n, rule in items if type(rule) is kind]


@pytest.mark.parametrize(("model", "name", "rule"), rules(fields.Refused))
def test_refused_fields_are_refused_unless_they_change_nothing(
    model: Any, name: str, rule: fields.Refused
) -> None:
    for harmless in (None, *rule.harmless):
        call_of(made(model, **{name: harmless}), PRESETS)
    with pytest.raises(InvalidRequest) as refused:
        made(model, **{name: {"some": "thing"}})
    assert [*map(str, refused.value.violations)] == [str(Violation(name, rule.why))]


@pytest.mark.parametrize("model", BODIES)
def test_ignored_fields_change_nothing(model: Any) -> None:
    given = {name: "x" for one, name, _ in rules(fields.Ignored) if one is model}
    extension = {"specrej": {"cache": "use"}}
    ignored = set[str]()
    body = json.dumps({**BODIES[model], **given, **extension}).encode()
    request = call_of(fields.parsed(model, body, ignored), PRESETS)
    assert ignored == {*given}
    plain = call_of(made(model, **extension), PRESETS)
    assert request.prompt == plain.prompt
    assert {**request.options, "seed": 0} == {**plain.options, "seed": 0}


def test_all_bad_fields_are_reported_at_once() -> None:
    """Guards against a caller who corrects types first, then unknown fields, then ranges."""
    given: dict[str, Any] = {
        "functions": [{}], "suffix": "x", "n": "2", "max_tokens": 0, "temperature": 3,
        "bad_words": ["x"],
    }  # fmt: skip
    found = violations(**given, specrej={"alpha": 1, "min_p": "x"})
    assert found.keys() == {*given, "specrej.alpha", "specrej.min_p"}
    assert found["temperature"] == "must be 0 or 0.01 .. 2, is 3.0"
    assert violations(logit_bias={"abc": 1}).keys() == {"logit_bias.abc"}
    for rewards, field in (({"a": "x"}, ".a"), ([{"name": "a", "weight": "x"}], "[0].weight")):
        assert violations(specrej={"rewards": rewards}).keys() == {f"specrej.rewards{field}"}


USER = {"role": "user", "content": "x"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
CUSTOM = {"type": "custom", "id": "x", "function": {"name": "f", "arguments": "{}"}}
UNSUPPORTED: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (ChatRequest, {"messages": [message]}, f"messages[0].{field}")
        for message, field in (
            ({"role": "user", "content": [{"type": "image_url"}]}, "content"),
            ({"role": "user", "content": [{"type": "text", "text": 1}]}, "content"),
            ({"role": "function", "name": "f", "content": "x"}, "role"),
            ({"role": "assistant", "function_call": {"name": "f"}}, "function_call"),
            ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "tool_calls[0].function"),
            ({"role": "assistant", "tool_calls": [CUSTOM]}, "tool_calls[0].type"),
        )
    ),
    *(
        (ChatRequest, {"tool_choice": choice}, "tool_choice")
        for choice in (
            {"type": "allowed_tools", "mode": "auto", "tools": F},
            {"type": "function", "name": "f", "x": 1},
        )
    ),
    (ChatRequest, {"tools": [CUSTOM]}, "tools[0].type"),
    (ChatRequest, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (ChatRequest, {"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
    *(
        (ChatRequest, {"structured_outputs": given}, "structured_outputs")
        for given in ({"json": {}, "regex": "a"}, {}, {"regex": 1}, {"choice": []})
    ),
    (ResponsesRequest, {"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].type"),
    (ResponsesRequest, {"input": []}, "input"),
    *(
        (ResponsesRequest, {"input": [item]}, f"input[0]{field}")
        for item, field in (
            ({"type": "item_reference", "id": "x"}, ".type"),
            ({"type": "function_call", "name": "f"}, ""),
            ({"type": "message", "content": "x"}, ""),
            ({"role": "user", "content": [{"type": "input_file"}]}, ".content"),
        )
    ),
    *(
        (MessagesRequest, {"messages": [{**USER, "content": [part]}]}, f"messages[0].content[0]{f}")
        for part, f in (({"type": "document"}, ".type"), ({"type": "text"}, ""), (IMAGE, ".source"))
    ),
    (
        MessagesRequest,
        {"tools": [{"type": "bash_20250124", "name": "f", "input_schema": {}}]},
        "tools[0].type",
    ),
    (MessagesRequest, {"tool_choice": {"type": "tool"}}, "tool_choice"),
    (MessagesRequest, {"thinking": {"type": "between_tools"}}, "thinking.type"),
    (MessagesRequest, {"max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("model", "given", "field"), UNSUPPORTED)
def test_what_is_not_supported_is_named(model: Any, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call_of(made(model, **given), PRESETS)
    assert [violation.field for violation in refused.value.violations] == [field]


def test_errors_of_prompts_have_the_callers_field() -> None:
    calls = [{"id": "x", "function": {"name": "f", "arguments": "{"}}]
    call = call_of(chat(tools=F, messages=[{"role": "assistant", "tool_calls": calls}]), PRESETS)
    names = {
        "prompt": "messages",
        "prompt.messages[0].tool_calls[0].name": "messages[0].tool_calls[0].function.name",
        "prompt.tools[0].parameters": "tools[0].function.parameters",
        "prompt.tools": "tools",
        "prompt.tool_name": "tool_choice",
        "prompt.messages[0].tool_call_id": "messages[0].tool_call_id",
    }
    assert {path: call.name_of(path) for path in names} == names
    assert call_of(made(CompletionRequest), PRESETS).name_of("prompt") == "prompt"


@pytest.mark.parametrize("value", [None, {"a": 1}])
def test_parsed_answers_can_be_turns(value: Any) -> None:
    """Guards against a second turn that is refused: `parse` of the official client adds a field."""
    answer: Any = chat_types.ParsedChatCompletionMessage(
        role="assistant", content='{"a":1}', parsed=value
    )
    call = call_of(chat(messages=[USER, answer.model_dump(), USER]), PRESETS)
    assert call.prompt.messages[1] == c.Message("assistant", '{"a":1}')


def test_turns_have_the_texts_of_all_their_parts() -> None:
    parts = [
        {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}},
        {"type": "text", "text": "b"},
    ]
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    expected = c.Message("system", "Be brief."), c.Message("user", "ab")
    assert call_of(chat(messages=turns), {}).prompt == c.Prompt(messages=expected)


def test_every_option_of_the_client_can_be_set() -> None:
    """Guards against an option of the core without a name here; new ones appear in `specrej`."""
    own = {rule.path for rule in TABLE.values() if isinstance(rule, fields.Maps)}
    for name, option in c.declared_options().items():
        assert name in fields.Extension.model_fields or option.path in own, name


def test_options_arrive_as_the_clients() -> None:
    call = call_of(
        chat(
            model="m:sr-32", n=2, temperature=0.5, top_p=0.9, stop="\n", seed=7, max_tokens=9,
            logprobs=True, top_logprobs=3, presence_penalty=1, frequency_penalty=-0.5,
            logit_bias={"50256": -100, "7": 1.5},
            specrej={
                "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [3],
                "alpha": 0.25, "top_k": 5, "min_tokens": 2, "ignore_eos": True,
                "schedule": {"kind": "tokens", "tokens": [4, 8]}, "cache": "refresh",
                "rewards": [{"name": "a", "weight": 2, "normalization": {"kind": "batch"}}],
                "allow_degraded": True, "timeout_s": 5,
            },
        ),
        PRESETS,
    )  # fmt: skip
    assert call.options == c.Options(
        model="m", n=32, return_candidates=2, min_answers=2, temperature=0.5, top_p=0.9,
        stop=["\n"], seed=7, max_tokens=9, logprobs=True, top_logprobs=3, alpha=0.25,
        top_k=5, min_tokens=2, ignore_eos=True, schedule=c.Schedule("tokens", tokens=(4, 8)),
        cache=c.CacheControl.REFRESH, allow_degraded=True,
        rewards=(c.WeightedReward("a", 2.0, c.Normalization("batch")),),
        presence_penalty=1.0, frequency_penalty=-0.5, logit_bias={50256: -100.0, 7: 1.5},
        min_p=0.1, repetition_penalty=1.2, stop_token_ids=(3,),
    )  # fmt: skip
    assert call.timeout_s == 5
    assert call.name_of("selection.n") == "model: sr-32.n"
    assert call.name_of("selection.rewards[0].weight") == "specrej.rewards[0].weight"
    assert call.name_of("sampling.min_tokens") == "specrej.min_tokens"
    assert call.name_of("sampling.logit_bias[1].bias") == "logit_bias.7.bias"
    assert call.name_of("sampling.max_tokens") == "max_tokens"  # its default, too


def test_several_choices_are_promised() -> None:
    """Guards against rejection that leaves fewer answers than choices."""
    call = call_of(chat(n=3), {})
    assert call.options["min_answers"] == 3
    assert call.name_of("selection.min_answers") == "n"
    assert "min_answers" not in call_of(chat(n=1), {}).options
    call = call_of(chat(n=3, specrej={"min_answers": 1}), {})
    assert call.options["min_answers"] == 1
    assert call.name_of("selection.min_answers") == "specrej.min_answers"


def test_completions_name_a_number_of_log_probabilities() -> None:
    for number in (0, 5):
        call = call_of(made(CompletionRequest, logprobs=number), PRESETS)
        assert (call.options["logprobs"], call.options["top_logprobs"]) == (True, number)
        assert call.name_of("sampling.top_logprobs") == "logprobs"
    assert call_of(chat(logprobs=False), {}).options["logprobs"] is False


def test_response_formats() -> None:
    """As the official client sends them, and errors at the caller's own path."""
    schema = {"type": "object", "title": "\u00e9"}  # sent without spaces and escapes: it is bounded
    named = {"name": "a", "schema": schema, "strict": False}
    made = c.JsonSchema('{"type":"object","title":"\u00e9"}')
    kind = {"type": "json_schema"}
    for given, output in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, c.JsonObject()),
        ({**kind, "json_schema": named}, made),
    ):
        call = call_of(chat(response_format=given), PRESETS)
        assert call.options.get("structured_output") == output
        path = "sampling.structured_output.json_schema.schema"
        assert not output or call.name_of(path) == "response_format.json_schema.schema"
    for bad, field in (
        (kind, "response_format"),
        ({"type": "json_object", "json_schema": named}, "response_format"),
        ({**kind, "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
    ):
        assert violations(response_format=bad).keys() == {field}


def test_contradictions_are_errors() -> None:
    assert "best_of" in violations(n=3, best_of=2)
    assert "specrej.n" in violations(n=3, specrej={"n": 2})
    for model in ("m", "m:sr-32"):
        assert violations(model=model, n=3, temperature=0).keys() == {"n"}
    assert "specrej.n" in violations(best_of=4, specrej={"n": 8})
    assert "max_completion_tokens" in violations(max_tokens=1, max_completion_tokens=2)
    assert "specrej.top_k" in violations(top_k=1, specrej={"top_k": 2})
    assert call_of(chat(max_tokens=1, max_completion_tokens=1), {}).options["max_tokens"] == 1
    assert "stream_options" in violations(stream_options={"include_usage": True})
    assert "specrej.nothing" in violations(specrej={"nothing": 1})
    assert any(name.startswith("specrej.schedule") for name in violations(
        specrej={"schedule": {"kind": "memory", "first": 4, "second": 8}}
    ))  # fmt: skip


def test_answers_without_a_seed_are_not_stored() -> None:
    """Guards against a cache full of answers that no later request can find."""
    options = call_of(chat(), {}).options
    assert options["cache"] is c.CacheControl.BYPASS
    assert options["seed"] != call_of(chat(), {}).options["seed"]
    assert "cache" not in call_of(chat(seed=1), {}).options
    greedy = call_of(chat(temperature=0), {}).options
    assert "seed" not in greedy and "cache" not in greedy


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("top_logprobs", {"max_tokens": MAX_LOGPROBS // 21, "top_logprobs": 20}),
        ("logprobs", {"max_tokens": MAX_LOGPROBS // 4, "n": 4}),
    ],
)
def test_log_probabilities_of_an_answer_are_bounded(field: str, given: dict[str, int]) -> None:
    """Guards the process's memory: the largest answers took 1.2 GB while they were converted."""
    assert call_of(chat(logprobs=True, **given), PRESETS).wants_logprobs
    given["max_tokens"] += 1
    assert f"at most {MAX_LOGPROBS}" in violations(logprobs=True, **given)[field]
    assert not call_of(chat(**given | {"top_logprobs": 0}), PRESETS).wants_logprobs


def test_bodies_that_are_no_requests() -> None:
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 10**5, b'{"model": NaN}'):
        with pytest.raises(InvalidRequest):
            fields.parsed(ChatRequest, body)


WRONG = {"type": "object", "default": math.inf}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": WRONG}


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (ChatRequest, {"tools": [{**F[0], "function": {"name": "f", "parameters": WRONG}}]}),
        (ResponsesRequest, {"tools": [{"type": "function", "name": "f", "parameters": WRONG}]}),
        (ResponsesRequest, {"tools": [{"type": "function", "name": "f", "strict": WRONG}]}),
        (MessagesRequest, {"tools": [{"name": "f", "input_schema": WRONG}]}),
        (MessagesRequest, {"messages": [{"role": "assistant", "content": [CALL]}]}),
    ],
)
def test_numbers_that_json_lacks_are_refused(model: Any, given: dict[str, Any]) -> None:
    """Guards against internal errors, some after the whole answer: the parser reads them."""
    with pytest.raises(InvalidRequest, match="must be JSON"):
        made(model, **given)


@pytest.mark.parametrize(
    ("presets", "problem"),
    [
        ('{"a": {"n": -1}}', "a.n must be"),
        ('{"a": {"alpha": 1}}', "a.alpha must be"),
        ('{"a": {"max_tokens": 1}}', "Extra inputs"),
        ('{"a b": {"n": 1}}', "pattern"),
        ('{"a": {"algorithm": "best"}}', "best-of-n"),
    ],
)
def test_a_bad_preset_stops_the_process(
    presets: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECREJ_GATEWAY_PRESETS", presets)
    with pytest.raises(ValueError, match=problem):
        GatewaySettings()


def test_a_preset_gives_way_to_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against requests that a preset makes invalid; the caller's own options stay."""
    monkeypatch.setenv("SPECREJ_GATEWAY_PRESETS", '{"two": {"n": 8, "min_answers": 2}}')
    presets = GatewaySettings().presets
    greedy = call_of(chat(model="m:two", temperature=0), presets).options
    assert greedy == c.Options(model="m", temperature=0.0)
    for choices, n, least in ((None, 8, 2), (1, 8, 2), (8, 8, 8), (9, None, 9)):
        options = call_of(chat(model="m:two", n=choices), presets).options
        assert (options.get("n"), options["min_answers"]) == (n, least)
    assert violations(model="m:sr-32", n=40, specrej={"n": 3}).keys() == {"specrej.n"}
    assert violations(model="m:sr-32", n=5, best_of=3).keys() == {"best_of"}


def test_presets_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = {"kind": "geometric", "first": 32}
    preset = {"n": 64, "alpha": 0.3, "schedule": schedule, "rewards": {"relevance": 1}}
    monkeypatch.setenv("SPECREJ_GATEWAY_PRESETS", json.dumps({"careful": preset}))
    options = call_of(chat(model="a:b:careful", seed=1), GatewaySettings().presets).options
    assert options == c.Options(
        n=64, alpha=0.3, schedule=c.Schedule(first=32), rewards={"relevance": 1.0},
        seed=1, model="a:b",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"max_tokens": -1, "top_k": -1, "seed": None, "specrej": None, "stop": None}, {}),
        ({"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True,
          "stop_token_ids": [3]},
         {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True,
          "stop_token_ids": [3]}),
        *(({"structured_outputs": {kind: value}}, {"structured_output": output})
          for kind, value, output in OUTPUTS),
        *(({f"guided_{kind}": value}, {"structured_output": output})
          for kind, value, output in OUTPUTS[:-1]),
    ],
)  # fmt: skip
def test_fields_of_vllm_arrive(given: dict[str, Any], options: dict[str, Any]) -> None:
    """Guards clients of vLLM against a field that is dropped, or that has another meaning here."""
    expected = call_of(chat(), {}).options.keys() | options.keys()
    found = call_of(chat(**given), {}).options
    assert found.keys() == expected and {name: found[name] for name in options} == options
    assert found["seed"] >= 0 and found["seed"] != call_of(chat(seed=-1), {}).options["seed"]


def test_the_last_turn_of_the_assistant_can_be_continued() -> None:
    """Guards against an answer that begins anew, as clients of vLLM ask for its continuation."""
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because"}]
    given = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    prompt = call_of(chat(**given), PRESETS).prompt
    assert (prompt.continue_final, prompt.beginning) == (True, "Because")
    given["continue_final_message"] = False
    assert violations(**given).keys() == {"add_generation_prompt"}
