"""Statuses, bodies and headers of errors; tokens; what logs and answers must not contain."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import APIStatusError, AsyncOpenAI, AuthenticationError

from gateway.__main__ import Server
from gateway.app import Gateway
from gateway.settings import GatewaySettings
from specrej.contracts import errors
from tests.gateway.gateways import (
    BODY,
    CHAT,
    STREAM,
    Connection,
    gateway_at,
    get,
    post,
    request,
    tokens_file,
    whole_reply,
)
from tests.serving import listening
from tests.specrej.fakes import EVENTS, FakeOrchestrator

VIOLATION = errors.Violation("sampling.temperature", "must be 0 or 0.01 .. 2, is 3")
BAD = errors.InvalidRequest([VIOLATION])
LONG = errors.InvalidRequest([VIOLATION], reason="CONTEXT_EXCEEDED")
LARGE = errors.InvalidRequest([VIOLATION], reason="SLOTS_EXCEEDED")
FULL = errors.Overloaded("full", retry_after_s=2.5)
AWAY = errors.Unavailable("away", retry_after_s=0.5)
FINAL = {"x-should-retry": "false"}  # clients do not repeat it


def _after(seconds: str, ms: str) -> dict[str, str]:
    return {"retry-after": seconds, "retry-after-ms": ms}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (BAD, 400, "invalid_request_error", "invalid_value", {}),
        (LONG, 400, "invalid_request_error", "context_length_exceeded", {}),
        (LARGE, 400, "invalid_request_error", "slots_exceeded", {}),
        (errors.Unauthenticated("no"), 401, "authentication_error", "invalid_api_key", {}),
        (errors.PermissionDenied("no"), 403, "permission_error", "permission_denied", {}),
        (errors.NotFound("no"), 404, "invalid_request_error", "not_found", {}),
        (FULL, 429, "rate_limit_error", "rate_limit_exceeded", _after("3", "2500")),
        (AWAY, 503, "service_unavailable_error", "unavailable", FINAL | _after("1", "500")),
        (errors.DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded", FINAL),
        (errors.InternalError("bug 1"), 500, "server_error", "internal_error", FINAL),
    ],
)
async def test_each_error_has_its_status(
    orchestrator: FakeOrchestrator,
    gateway: Server,
    error: errors.SpecrejError,
    status: int,
    kind: str,
    code: str,
    headers: dict[str, str],
    stream: bool,
) -> None:
    orchestrator.failures = [error]
    body = {**BODY, "temperature": 1, "stream": stream}
    answered, received, content = await post(gateway.port, CHAT, body)
    assert answered == status
    failure = content["error"]
    assert (failure["type"], failure["code"]) == (kind, code)
    assert failure["param"] == ("temperature" if status == 400 else None)
    expected = f"temperature: {VIOLATION.description}" if status == 400 else error.message
    assert failure["message"] == expected
    retries = ("retry-after", "retry-after-ms", "x-should-retry")
    assert {name: received[name] for name in retries if name in received} == headers


async def test_only_overload_is_repeated_by_the_official_client(
    orchestrator: FakeOrchestrator, gateway: Server
) -> None:
    """Guards against a large N that is generated again after an error."""
    url = f"http://127.0.0.1:{gateway.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="x", max_retries=3) as client:
        orchestrator.failures = [errors.Overloaded("full", retry_after_s=0.01)] * 2
        await client.chat.completions.create(**BODY)
        assert len(orchestrator.requests) == 3
        for error in (errors.InternalError("bug"), errors.DeadlineExceeded("late")):
            orchestrator.requests.clear()
            orchestrator.failures = [error]
            with pytest.raises(APIStatusError):
                await client.chat.completions.create(**BODY)
            assert len(orchestrator.requests) == 1


def test_the_deadline_is_below_the_official_clients() -> None:
    """Guards against a client that times out first, and repeats a large N."""
    assert isinstance(openai.DEFAULT_TIMEOUT.read, float | int)
    assert GatewaySettings().deadline_s < openai.DEFAULT_TIMEOUT.read


@pytest.mark.parametrize(
    ("path", "beginning"),
    [(CHAT, b'data: {"error":'), ("/v1/specrej/stream", b'event: error\ndata: {"error":')],
)
async def test_a_late_error_is_the_last_event(
    orchestrator: FakeOrchestrator, gateway: Server, path: str, beginning: bytes
) -> None:
    """Guards against a stream that fails and still ends with [DONE]."""
    orchestrator.events = EVENTS[:1]  # ends without an answer
    text = await whole_reply(gateway.port, path, STREAM)
    assert beginning in text
    assert b"[DONE]" not in text
    assert text.endswith(b"0\r\n\r\n")


async def test_a_bug_is_opaque_and_logged(
    gateway: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: Gateway, http: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(Gateway, "_models", broken)
    status, headers, body = await get(gateway.port, "/v1/models")
    assert (status, headers["x-should-retry"]) == (500, "false")
    assert "secret" not in json.dumps(body)
    (record,) = (r for r in caplog.records if r.name == "gateway.errors")
    assert body["error"]["message"].removeprefix("internal error ") in record.getMessage()


async def test_an_error_has_no_address_of_the_orchestrator() -> None:
    """Guards against a text of grpc, which names hosts and ports of the inside."""
    async with gateway_at("127.0.0.1:1") as server:
        status, headers, body = await post(server.port, CHAT, STREAM)
    assert (status, headers["x-should-retry"]) == (503, "false")
    assert body["error"]["message"] == "the orchestrator cannot be reached"


async def test_logs_have_no_content_of_requests(
    orchestrator: FakeOrchestrator, gateway: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        secret = [{"role": "user", "content": "sesame"}]
        for fields in ({}, {"stream": True}, {"sesame": 1}, {"n": "sesame"}, {"tools": ["sesame"]}):
            body = {**BODY, "messages": secret, **fields}
            await whole_reply(gateway.port, CHAT, body, authorization="Bearer sesame")
    assert orchestrator.requests
    own = [r.getMessage() for r in caplog.records if not r.name.startswith(("grpc", "asyncio"))]
    assert own
    assert not [line for line in own if "sesame" in line]


async def test_routes_that_do_not_exist(gateway: Server) -> None:
    status, _, body = await post(gateway.port, "/v1/nothing", BODY)
    assert (status, body["error"]["code"]) == (404, "not_found")
    status, headers, body = await get(gateway.port, CHAT)
    assert (status, headers["allow"], body["error"]["code"]) == (405, "post", "method_not_allowed")
    assert (await get(gateway.port, "/healthz"))[0] == 200


# Tokens


async def test_the_callers_token_reaches_the_orchestrator(
    orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    """Guards against a gateway whose callers all are one tenant."""
    service = orchestrator.service()
    async with (
        listening(service, tokens_file=tokens_file(tmp_path, "red", "blue")) as address,
        gateway_at(address) as server,
    ):
        url = f"http://127.0.0.1:{server.port}/v1"
        for token in ("red", "blue"):
            async with AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as client:
                await client.chat.completions.create(**BODY)
                await client.models.list()
                stream = await client.chat.completions.create(**BODY, stream=True)
                assert [chunk async for chunk in stream]
        assert orchestrator.tenants == ["red", "red", "blue", "blue"]
        async with AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(AuthenticationError, match="unknown token"):
                await client.chat.completions.create(**BODY)
        for headers in ({}, {"authorization": "Basic cmVkOg=="}, {"authorization": "Bearer"}):
            status, _, _ = await post(server.port, CHAT, BODY, **headers)
            assert status == 401
        status, _, _ = await post(server.port, CHAT, BODY, authorization="Bearer a b")
        assert status == 401
    assert len(orchestrator.requests) == 4


async def test_a_token_is_needed_unless_anonymous_callers_are_allowed(
    orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    """Guards against any text that passes for a token where the orchestrator checks none."""
    for path, expected in (("", 401), (tokens_file(tmp_path, "x"), 200)):
        async with (
            listening(orchestrator.service(), tokens_file=path) as address,
            gateway_at(address, allow_anonymous=False) as server,
        ):
            status, _, body = await post(server.port, CHAT, BODY)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            status, _, body = await post(server.port, CHAT, BODY, authorization="bearer x")
            assert status == expected
    assert orchestrator.tenants == ["x"]


async def test_a_call_that_is_silent_at_first_streams(orchestrator: FakeOrchestrator) -> None:
    """Guards against a queue that looks like a dead connection, and chunks of different ids."""
    service = orchestrator.service()
    orchestrator.events = (EVENTS[-1],)  # without one at admission
    async with listening(service) as address, gateway_at(address, keep_alive_s=0.05) as server:
        orchestrator.holds = True
        connection = await Connection.open(server.port, request(CHAT, STREAM, connection="close"))
        head = await connection.read_until(b": keep-alive\n\n")
        orchestrator.released.set()
        text = head + await connection.read_all()
    assert b"[DONE]" in text
    assert len(set(re.findall(rb'"id":"(chatcmpl-\w+)"', text))) == 1
