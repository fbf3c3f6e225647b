"""Clients that leave: in every phase the request ends at once, and its slots are free."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from deploy.local.stack import Stack
from tests.endpoints import scrape
from tests.gateway.gateways import BODY, CHAT, Connection, post, request
from tests.serving import describe_generator, describe_service, until, until_read

pytestmark = pytest.mark.asyncio(loop_scope="session")

RAW, TEXT = "/v1/specrej/stream", "/v1/completions"
LONG = {"max_tokens": 1500, "specrej": {"n": 4, "ignore_eos": True}}
WHOLE, STREAM = {**BODY, **LONG}, {**BODY, **LONG, "stream": True}
RAW_TEXT: dict[str, Any] = {"model": "toy", "prompt": "Once", **LONG, "stream": True}

Leave = Callable[[Connection], None]


async def owned(stack: Stack) -> tuple[int, int, int]:
    """Slots and sessions of the generator, requests of the orchestrator."""
    generator = await describe_generator(stack.generator_address)
    service = await describe_service(stack.orchestrator_address)
    return generator.slots.owned, generator.sessions, service.running + service.queued


async def all_free(stack: Stack) -> bool:
    return await owned(stack) == (0, 0, 0)


async def num_answers(stack: Stack) -> float:
    return (await scrape(stack.metrics_urls[:1])).sum("specrej_answers_total")


async def num_calls(stack: Stack) -> float:
    """Calls of Generate that the orchestrator has received."""
    values = await scrape(stack.metrics_urls[:1])
    method = "specrej.v1.OrchestratorService/Generate"
    return values.sum("specrej_rpc_server_started_total", rpc_method=method)


@pytest.mark.parametrize(
    ("path", "body", "after", "leave"),
    [
        (CHAT, WHOLE, b"", Connection.leave),
        (CHAT, WHOLE, b"", Connection.reset),
        (CHAT, STREAM, b"", Connection.reset),
        (TEXT, RAW_TEXT, b"200 OK", Connection.leave),
        (RAW, WHOLE, b"event: admitted", Connection.reset),
    ],
)
async def test_slots_are_free_after_a_client_left(
    stack: Stack, path: str, body: dict[str, Any], after: bytes, leave: Leave
) -> None:
    before = await num_answers(stack)
    connection = await Connection.open(stack.ports.gateway, request(path, body))
    if after:
        await connection.read_until(after)
    await until_read(lambda: owned(stack), lambda found: found[0] > 0)
    leave(connection)
    await until(lambda: all_free(stack))
    assert await num_answers(stack) == before  # it did not run to its end


async def test_a_body_that_ends_early_begins_nothing(stack: Stack) -> None:
    async def num_left() -> float:
        values = await scrape([stack.metrics_urls[-1]])
        name = "http_server_request_duration_seconds_count"
        return values.sum(name, http_response_status_code="499")

    calls, before = await num_calls(stack), await num_left()
    connection = await Connection.open(stack.ports.gateway, request(CHAT, WHOLE)[:-5])
    connection.leave()
    await until_read(num_left, lambda number: number == before + 1)
    assert await num_calls(stack) == calls


async def test_a_killed_orchestrator_is_an_error_event(stack: Stack) -> None:
    """Guards against a stream that goes silent, or ends as if it were complete."""
    connection = await Connection.open(
        stack.ports.gateway, request(CHAT, STREAM, connection="close")
    )
    await connection.read_until(b'"role":"assistant"')
    os.kill(stack.processes["orchestrator"], signal.SIGKILL)
    text = await connection.read_all()
    assert b'"message":"the orchestrator cannot be reached"' in text and b"[DONE]" not in text
    await stack.restart("orchestrator")

    short = {**BODY, "max_tokens": 1}
    await until_read(lambda: post(stack.ports.gateway, CHAT, short), lambda found: found[0] == 200)
    assert await all_free(stack)
