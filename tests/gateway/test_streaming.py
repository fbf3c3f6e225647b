"""The parts of a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from gateway.completions import Answer, ChatRequest, call_of, parsed
from gateway.connection import Disconnected
from gateway.streaming import Events, _part, raw_stream
from specrej.contracts import Event
from tests.gateway.gateways import BODY, CHAT, STREAM, gateway_at, whole_reply
from tests.specrej.fakes import EVENTS, GENERATION, ONE, FakeOrchestrator


def test_a_part_has_the_same_lines_for_every_client() -> None:
    """Guards against clients for which U+2028, U+2029 or U+0085 in a text ends the line."""
    text = "one\u2028two\u2029three\u0085four\nfive"
    name, data, *end = _part({"text": text}, "finished").decode().splitlines()
    assert (name, end) == ("event: finished", [""])
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


def test_no_text_is_sent_twice() -> None:
    """Guards against a whole second text where the first one's last bytes became invalid."""
    answer = Answer("toy", 1, is_chat=True, logprobs=False)
    assert [*answer.delta("r", "the be\u2019")]
    rest, _ = answer.closing("r", ONE, include_usage=False)
    assert rest["choices"][0]["delta"] == {"content": "st"}


def test_the_usage_counts_all_choices() -> None:
    answer = Answer("toy", 2, is_chat=True, logprobs=False)
    usage = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
    assert answer.whole(GENERATION)["usage"] == usage


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
