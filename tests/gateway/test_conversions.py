"""Large values are converted beside the event loop, which other calls need."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway import streaming
from gateway.answers import CompletionAnswer
from gateway.streaming import PackedResponse
from specrej import contracts as c
from specrej.contracts import Finished, Generation, wire
from tests.gateway.gateways import (
    BODY,
    CHAT,
    STREAM,
    Connection,
    gateway_at,
    post,
    request,
    whole_reply,
)
from tests.serving import until
from tests.specrej.fakes import EVENTS, GENERATION, FakeOrchestrator

Conversions = list[tuple[str, bool, Any]]


def conversions(monkeypatch: pytest.MonkeyPatch, *functions: str) -> Conversions:
    """Calls of functions of `wire`: the name, whether it is the event loop's thread, the value."""
    calls: Conversions = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(value: Any, *arguments: Any) -> Any:
            is_on_loop = threading.current_thread() is threading.main_thread()
            calls.append((name, is_on_loop, value))
            return function(value, *arguments)

        return call

    for name in functions:
        monkeypatch.setattr(wire, name, noted(name, getattr(wire, name)))
    return calls


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
    several = (replace(large, id=1), large)
    answer = CompletionAnswer("m", 2, is_chat=True, logprobs=True)
    tracemalloc.start()
    packed = PackedResponse(answer.body([replace(GENERATION, candidates=several)]), {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_bytes = int(packed.headers["content-length"])
    assert num_bytes > 2_000_000 and peak < num_bytes / 2
    body = json.loads("".join(answer.body([replace(GENERATION, candidates=several)])))
    for number, choice in enumerate(body["choices"]):
        values = choice["logprobs"]["content"]
        assert (choice["index"], len(values)) == (number, num_tokens)
        assert values[-1]["logprob"] == large.logprobs[-1] and values[0]["bytes"] == [*b"amber"]
        assert {len(value["top_logprobs"]) for value in values} == {tops}


async def test_a_client_that_takes_its_reply_too_slowly_is_disconnected(
    address: str, orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against replies that are held for hours."""
    monkeypatch.setattr(streaming, "_UNREAD_S", 0.3)
    monkeypatch.setattr(streaming, "_LEAST_BYTES_S", 1e9)
    large = replace(GENERATION.candidates[0], text="x" * 20_000_000)
    orchestrator.answer = replace(GENERATION, candidates=(large,))
    async with gateway_at(address) as server:
        connection = await Connection.open(server.port, request(CHAT, BODY))
        assert b"200 OK" in await connection.read_until(b"\r\n\r\n")
        await until(lambda: not server._state.tasks)
        assert len(await connection.read_all()) < 20_000_000


async def test_answers_are_converted_off_the_event_loop(
    address: str, orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards other calls against an answer of many candidates with many log-probabilities."""
    large = replace(GENERATION.candidates[0], text="x" * 10_000)
    orchestrator.events = (EVENTS[0], Finished(replace(GENERATION, candidates=(large,))))
    calls = conversions(monkeypatch, "generation_from_message", "to_plain")
    async with gateway_at(address) as server:
        assert (await post(server.port, CHAT, BODY))[0] == 200
        streamed = {**STREAM, "stream_options": {"include_usage": True}}
        assert b"[DONE]" in await whole_reply(server.port, CHAT, streamed)
    assert [is_on_loop for _, is_on_loop, _ in calls] == 4 * [False]
    answers = [value for _, _, value in calls if isinstance(value, Generation)]
    assert [(len(answer.candidates), answer.rounds) for answer in answers] == 2 * [(1, ())]
