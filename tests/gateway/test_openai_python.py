"""The official Python client against all services as processes, on toys."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "toy"
ASK: list[Any] = [{"role": "user", "content": "Name three uses of a brick."}]


def extra(**fields: Any) -> dict[str, Any]:
    return {"specrej": {"n": 4, **fields}}


async def create(client: AsyncOpenAI, **fields: Any) -> Any:
    """The answer to the question, or its stream, of four candidates unless `fields` change it."""
    usual = {"model": MODEL, "messages": ASK, "extra_body": extra()}
    return await client.chat.completions.create(**{**usual, **fields})


async def test_a_chat_is_answered(client: AsyncOpenAI) -> None:
    turns: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = await create(client, messages=turns, max_completion_tokens=24)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.model == MODEL
    assert answer.usage and 0 < answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model_extra
    about = answer.model_extra["specrej"]
    assert about["n"] == 4
    assert answer.id == f"chatcmpl-{about['request_id']}"
    assert answer._request_id == about["request_id"]


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "logprobs": True}]
)
async def test_a_stream_has_the_choices_of_a_whole_answer(
    client: AsyncOpenAI, fields: dict[str, Any]
) -> None:
    """Guards the order: role, text, end, usage; against choices that are mixed up or cut, and
    log-probabilities that are lost."""
    arguments = {"seed": 5, "max_tokens": 24, "extra_body": extra(n=8), **fields}
    whole = await create(client, **arguments)
    texts, logprobs, ends = defaultdict[int, str](str), defaultdict[int, list[Any]](list), {}
    usage = {"include_usage": True}
    stream = await create(client, **arguments, stream=True, stream_options=usage)
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert next(c for c in chunks if c.choices).choices[0].delta.role == "assistant"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert chunks[-2].choices[-1].finish_reason
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs and choice.logprobs.content:
                logprobs[choice.index] += choice.logprobs.content
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert len(whole.choices) == fields.get("n", 1)
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert ends[choice.index] == choice.finish_reason
        assert logprobs[choice.index] == ((choice.logprobs and choice.logprobs.content) or [])
    assert len(texts) == len(ends) == len(whole.choices)


async def test_raw_text_is_continued(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=["Once"], best_of=4, n=2, logprobs=2, max_tokens=8
    )
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.text
        made = choice.logprobs
        assert made and made.tokens and made.token_logprobs and made.text_offset
        assert made.top_logprobs and all(len(top) == 2 for top in made.top_logprobs)
        pairs = zip(made.tokens, made.token_logprobs, made.top_logprobs, strict=True)
        assert all(top[token] == logprob for token, logprob, top in pairs)
        assert [f" {choice.text}"[at] for at in made.text_offset] == [" "] * len(made.tokens)


async def test_log_probabilities_of_drawn_tokens(client: AsyncOpenAI) -> None:
    answer = await create(client, logprobs=True, top_logprobs=3, max_tokens=8)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and answer.usage
    assert len(logprobs.content) == answer.usage.completion_tokens
    text = "".join(item.token for item in logprobs.content)
    assert text == f" {answer.choices[0].message.content}"
    for item in logprobs.content:
        assert item.bytes and bytes(item.bytes).decode() == item.token
        assert item.logprob <= 0
        assert [top.token for top in item.top_logprobs].index(item.token) == 0
        assert len(item.top_logprobs) == 3
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, top_logprobs=3)
    assert refused.value.param == "top_logprobs"


async def test_presets_are_models(client: AsyncOpenAI) -> None:
    models = [model.id async for model in client.models.list()]
    presets = ("bon-32", "sr-32", "verify-16", "vote-16")
    assert models == [MODEL, *(f"{MODEL}:{preset}" for preset in presets)]
    assert (await client.models.retrieve(f"{MODEL}:bon-32")).id == f"{MODEL}:bon-32"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4o")
    answer = await create(client, model=f"{MODEL}:bon-32", max_tokens=20, extra_body=extra(n=3))
    assert answer.model == f"{MODEL}:bon-32"
    assert answer.model_extra and answer.model_extra["specrej"]["n"] == 3
    for unknown in ("gpt-4o", f"{MODEL}:none", "nothing:bon-32"):
        with pytest.raises(openai.NotFoundError) as missing:
            await create(client, model=unknown)
        assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
        listed = f"presets, after a colon: {', '.join(presets)}" in missing.value.message
        assert listed == (":" in unknown)
    for prompt in ([[1, 2]], ["one", "two"], ""):
        with pytest.raises(openai.BadRequestError, match="must be one text"):
            await client.completions.create(prompt=prompt, model=MODEL)


async def test_errors_of_the_core_name_the_callers_field(client: AsyncOpenAI) -> None:
    """Guards against errors about fields that the caller does not have."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 1.99999, "top_p": 0}, "top_p"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"3": 1, "-1": 1}}, "logit_bias.-1.token_id"),
        ({"extra_body": extra(stop_token_ids=[10**6])}, "specrej.stop_token_ids[0]"),
        ({"messages": [*ASK, {"role": "assistant", "content": "x"}]}, "messages[1].role"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"best_of": 10**6}}, "best_of"),
        ({"max_tokens": 5 * 10**9}, "max_tokens"),
    ]
    for fields, param in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            await create(client, **{"extra_body": None, **fields})
        assert refused.value.param == param
        assert refused.value.type == "invalid_request_error"
        assert param in refused.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        await create(client, extra_body=extra(rewards={"none": 1}))
    assert missing.value.param == "specrej.rewards"


ADD: Any = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
STEPS = 'Please call add {"a": 1} then call add {"a": 2}'


async def test_an_agent_of_chats_calls_its_tools(client: AsyncOpenAI) -> None:
    """Two steps with all services: calls whole and streamed, their results, and an answer."""
    turns: list[Any] = [{"role": "user", "content": STEPS}]
    made: list[Any] = []
    for _ in range(3):
        fields: Any = {"model": MODEL, "messages": turns, "seed": 5, "max_tokens": 200}
        fields["tools"] = [{"type": "function", "function": ADD}]
        fields["extra_body"] = extra(cache="bypass")
        message = (await client.chat.completions.create(**fields)).choices[0].message
        async with client.chat.completions.stream(**fields) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message
        assert (streamed.content or "") == (message.content or "")
        assert len(streamed.tool_calls or ()) == len(message.tool_calls or ())
        turns.append(message.model_dump())
        for call in message.tool_calls or ():
            made.append(json.loads(call.function.arguments))
            turns.append({"role": "tool", "tool_call_id": call.id, "content": f"{len(made)}!"})
    assert made == [{"a": 1}, {"a": 2}]
    ids = [turn["tool_call_id"] for turn in turns if turn["role"] == "tool"]
    assert len({*ids}) == 2
    assert message.content == "The result is 1!, 2!."
