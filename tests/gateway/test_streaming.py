"""The parts of a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from gateway.answers import CompletionAnswer
from gateway.bodies import Disconnected
from gateway.fields import parsed
from gateway.requests import ChatRequest, call_of
from gateway.streaming import Events, _part, raw_stream
from specrej.contracts import Event, TextDelta
from tests.gateway.gateways import BODY, CHAT, STREAM, gateway_at, get, post, whole_reply
from tests.specrej.fakes import EVENTS, GENERATION, ONE, FakeOrchestrator


def test_a_part_has_the_same_lines_for_every_client() -> None:
    """Guards against clients for which U+2028, U+2029 or U+0085 in a text ends the line."""
    text = "one\u2028two\u2029three\u0085four\nfive"
    name, data, *end = _part({"text": text}, "finished").decode().splitlines()
    assert (name, end) == ("event: finished", [""])
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


def test_no_text_is_sent_twice() -> None:
    """Guards against a whole second text where the first one's last bytes became invalid."""
    answer = CompletionAnswer("toy", 1, is_chat=True, logprobs=False)
    assert [*answer.delta(TextDelta(3, "the be\u2019"))]
    rest, _ = answer.closing(ONE)
    assert rest["choices"][0]["delta"] == {"content": "st"}


def test_the_usage_counts_all_choices() -> None:
    answer = CompletionAnswer("toy", 2, is_chat=True, logprobs=False)
    usage = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
    assert json.loads("".join(answer.body([GENERATION])))["usage"] == usage


async def test_a_client_that_leaves_ends_its_call_at_once() -> None:
    """Guards slots against calls that end when the garbage collector finds them."""
    is_sent, is_closed = asyncio.Event(), False

    async def events() -> AsyncGenerator[Event, None]:
        nonlocal is_closed
        try:
            yield EVENTS[0]
            await asyncio.Event().wait()
        finally:
            is_closed = True

    async def receive() -> dict[str, str]:
        await is_sent.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            is_sent.set()

    call = call_of(parsed(ChatRequest, json.dumps(BODY).encode()), {})
    stream = raw_stream(Events(events(), 60), call)
    with pytest.raises(Disconnected):
        await stream({}, receive, send)
    assert is_closed


@pytest.mark.parametrize(
    ("body", "is_sent"),
    [({}, True), ({"logprobs": True}, False), ({"n": 2, "specrej": {"n": 4}}, False)],
)
async def test_text_is_requested_where_it_is_sent(
    orchestrator: FakeOrchestrator, address: str, body: dict[str, Any], is_sent: bool
) -> None:
    """Guards against a run that stops after each token for text that only comes at the end."""
    async with gateway_at(address) as server:
        for path in (CHAT, "/v1/specrej/stream"):
            await whole_reply(server.port, path, {**STREAM, **body})
    assert [stream.text_deltas for stream in orchestrator.streams] == [is_sent, True]


async def test_names_and_fields_of_other_servers(
    orchestrator: FakeOrchestrator, address: str
) -> None:
    """Guards programs that were written for another server, and readers of its headers."""
    fields = {"user": "u", "colour": 1, "a\r\nb: c": 2, "top_k": 3}
    body = BODY | fields | {"model": "gpt-4o"}
    async with gateway_at(address, model_names=["gpt-4o"]) as server:
        _, headers, answer = await post(server.port, CHAT, body)
        assert (headers["x-specrej-ignored"], answer["model"]) == ("?, colour, user", "gpt-4o")
        assert (orchestrator.requests[-1].model, orchestrator.requests[-1].sampling.top_k) == (
            "",
            3,
        )
        streamed = await whole_reply(server.port, CHAT, body | {"stream": True})
        assert b"x-specrej-ignored: ?, colour, user\r\n" in streamed
        _, _, models = await get(server.port, "/v1/models")
        assert [model["id"] for model in models["data"]][::5] == ["gpt-4o", "tiny"]
    async with gateway_at(address, strict_fields=True) as server:
        status, _, answer = await post(server.port, CHAT, BODY | fields)
        assert (status, answer["error"]["param"]) == (400, "a\r\nb: c")


@pytest.mark.parametrize(
    ("path", "body", "shows"),
    [
        (CHAT, {}, True),
        (CHAT, {"specrej": {"events": "none"}}, False),
        (CHAT, {"model": "toy:bon-32"}, False),
        ("/v1/completions", {"prompt": "x"}, False),
    ],
)
async def test_a_preset_shows_rounds_in_chats(
    address: str, path: str, body: dict[str, Any], shows: bool
) -> None:
    """Guards against chunks that clients of completions do not know, and progress without end."""
    async with gateway_at(address) as server:
        streamed = await whole_reply(server.port, path, {**STREAM, "model": "toy:sr-32", **body})
    assert (b"round 1:" in streamed, b"[DONE]" in streamed) == (shows, True)
