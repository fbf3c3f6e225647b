"""The parts of a stream of events."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import AsyncGenerator, Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from gateway import streaming
from gateway.__main__ import Server
from gateway.answers import CompletionAnswer
from gateway.bodies import Disconnected
from gateway.fields import parsed
from gateway.requests import ChatRequest, call_of
from gateway.streaming import Events, PackedResponse, _part, raw_stream
from specrej import contracts as c
from specrej.contracts import Event, Finished, Generation, TextDelta, wire
from tests.gateway import gateways
from tests.serving import until
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
    answer = CompletionAnswer("toy", 2, is_chat=False, logprobs=True)
    usage = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
    bare = replace(GENERATION.candidates[1], tokens=(), logprobs=(), top_logprobs=())
    two = replace(GENERATION, candidates=(GENERATION.best, bare))
    made = json.loads("".join(answer.body(two)))
    assert made["usage"] == usage
    assert [one["logprobs"]["text_offset"] for one in made["choices"]] == [[0, 2, 3], []]


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

    call = call_of(parsed(ChatRequest, json.dumps(gateways.BODY).encode()), {})
    stream = raw_stream(Events(events(), 60), call)
    with pytest.raises(Disconnected):
        await stream({}, receive, send)
    assert is_closed


@pytest.mark.parametrize(
    ("body", "is_sent"),
    [({}, True), ({"logprobs": True}, False), ({"n": 2, "specrej": {"n": 4}}, False)],
)
async def test_text_is_requested_where_it_is_sent(
    orchestrator: FakeOrchestrator, gateway: Server, body: dict[str, Any], is_sent: bool
) -> None:
    """Guards against a run that stops after each token for text that only comes at the end."""
    for path in (gateways.CHAT, "/v1/specrej/stream"):
        await gateways.whole_reply(gateway.port, path, {**gateways.STREAM, **body})
    assert [stream.text_deltas for stream in orchestrator.streams] == [is_sent, True]


async def test_names_and_fields_of_other_servers(
    orchestrator: FakeOrchestrator, address: str
) -> None:
    """Guards programs that were written for another server, and readers of its headers."""
    fields = {"user": "u", "colour": 1, "a\r\nb: c": 2, "top_k": 3}
    body = gateways.BODY | fields | {"model": "gpt-4o"}
    async with gateways.gateway_at(address, model_names=["gpt-4o"]) as server:
        _, headers, answer = await gateways.post(server.port, gateways.CHAT, body)
        assert (headers["x-specrej-ignored"], answer["model"]) == ("?, colour, user", "gpt-4o")
        sent = orchestrator.requests[-1]
        assert (sent.model, sent.sampling.top_k) == ("", 3)
        streamed = await gateways.whole_reply(server.port, gateways.CHAT, body | {"stream": True})
        assert b"x-specrej-ignored: ?, colour, user\r\n" in streamed
        _, _, models = await gateways.get(server.port, "/v1/models")
        assert [model["id"] for model in models["data"]][::5] == ["gpt-4o", "tiny"]


# Large values are converted beside the event loop, which other calls need


@pytest.mark.parametrize("tops", [0, 20])
def test_a_body_is_made_in_parts(tops: int) -> None:
    """Guards memory against values as objects, all at once: they take ten times the body."""
    num_tokens = 20_000 // (tops + 1)
    top = c.TopLogprobs(tuple(c.TokenLogprob(n, b"amber", -0.5) for n in range(tops)))
    large = c.RankedCandidate(
        *(0, "x", 0.5, c.FinishReason.LENGTH, num_tokens, -1.0),
        token_ids=(3,) * num_tokens,
        logprobs=(-1.0986122886681098,) * num_tokens,
        tokens=(b"amber",) * num_tokens,
        top_logprobs=(top,) * num_tokens if tops else (),
    )
    made = replace(GENERATION, candidates=(replace(large, id=1), large))
    answer = CompletionAnswer("m", 2, is_chat=True, logprobs=True)
    tracemalloc.start()
    packed = PackedResponse(answer.body(made), {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_bytes = int(packed.headers["content-length"])
    assert num_bytes > 2_000_000 and peak < num_bytes / 2
    body = json.loads("".join(answer.body(made)))
    for number, choice in enumerate(body["choices"]):
        values = choice["logprobs"]["content"]
        assert (choice["index"], len(values)) == (number, num_tokens)
        assert values[-1]["logprob"] == large.logprobs[-1] and values[0]["bytes"] == [*b"amber"]
        assert {len(value["top_logprobs"]) for value in values} == {tops}


async def test_a_client_that_takes_its_reply_too_slowly_is_disconnected(
    gateway: Server, orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against replies that are held for hours."""
    monkeypatch.setattr(streaming, "_UNREAD_S", 0.3)
    monkeypatch.setattr(streaming, "_LEAST_BYTES_S", 1e9)
    large = replace(GENERATION.candidates[0], text="x" * 20_000_000)
    orchestrator.answer = replace(GENERATION, candidates=(large,))
    connection = await gateways.Connection.open(
        gateway.port, gateways.request(gateways.CHAT, gateways.BODY)
    )
    assert b"200 OK" in await connection.read_until(b"\r\n\r\n")
    await until(lambda: not gateway._state.tasks)
    assert len(await connection.read_all()) < 20_000_000


async def test_answers_are_converted_off_the_event_loop(
    gateway: Server, orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards other calls against an answer of many candidates with many log-probabilities."""
    large = replace(GENERATION.candidates[0], text="x" * 10_000)
    orchestrator.events = (EVENTS[0], Finished(replace(GENERATION, candidates=(large,))))
    calls: list[tuple[bool, Any]] = []  # whether it is the event loop's thread, and the value

    def noted(function: Callable[..., Any], value: Any, *arguments: Any) -> Any:
        calls.append((threading.current_thread() is threading.main_thread(), value))
        return function(value, *arguments)

    for name in ("generation_from_message", "to_plain"):
        monkeypatch.setattr(wire, name, partial(noted, getattr(wire, name)))
    assert (await gateways.post(gateway.port, gateways.CHAT, gateways.BODY))[0] == 200
    streamed = {**gateways.STREAM, "stream_options": {"include_usage": True}}
    assert b"[DONE]" in await gateways.whole_reply(gateway.port, gateways.CHAT, streamed)
    assert [is_on_loop for is_on_loop, _ in calls] == 4 * [False]
    answers = [value for _, value in calls if isinstance(value, Generation)]
    assert [(len(answer.candidates), answer.rounds) for answer in answers] == 2 * [(1, ())]
