"""Large values are converted beside the event loop, which other calls need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specrej.contracts import Finished, Generation, wire
from tests.gateway.gateways import BODY, CHAT, STREAM, gateway_at, post, whole_reply
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
