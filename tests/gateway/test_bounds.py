"""What a client may hold by being slow, silent, large or many."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import bodies
from gateway.__main__ import Server
from tests.gateway.gateways import (
    BODY,
    CHAT,
    MODELS,
    Connection,
    gateway_at,
    get,
    post,
    request,
    response_to,
    tokens_file,
)
from tests.serving import listening, until
from tests.specrej.fakes import FakeOrchestrator


@pytest.mark.parametrize("tokens", [["x" * 15_000], ["a", "b"]])
async def test_large_tokens_and_two_of_them_are_refused(gateway: Server, tokens: list[str]) -> None:
    """Guards against a status that invites to retry, as grpc refuses its metadata as too large; and
    against a proxy that checks one of two tokens and a service that uses the other."""
    lines = [f"authorization: Bearer {token}" for token in tokens]
    status, _, body = await get(gateway.port, "/v1/models", *lines)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_bodies_have_a_size(
    address: str, orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_at(address, max_body_bytes=2048) as server:
        long = await Connection.open(server.port, request(CHAT, {**BODY, "user": "x" * 4096}))
        assert (await long.response())[0] == 413
        long.leave()
        monkeypatch.setattr(bodies, "_BODIES", 0)
        assert (await post(server.port, CHAT, BODY))[0] == 200  # small ones are always read
        monkeypatch.setattr(bodies, "_SMALL_BODY", 0)
        status, headers, _ = await post(server.port, CHAT, BODY)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "x-should-retry" not in headers
        monkeypatch.undo()
        assert (await post(server.port, CHAT, BODY))[0] == 200
        assert server._gateway._bodies._num_bytes == 0
    assert len(orchestrator.requests) == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[' + b"{}," * 2_000_000 + b"{}]}",
        b'{"model":"m","metadata":[' + b"[]," * 2_000_000 + b"[]]}",
        b"{" + b'"":1,' * 1_000_000 + b'"":1}',
        b'"' * 8_000_000,
        b"[" * 8_000_000,
    ],
    ids=["items", "ignored", "keys", "quotes", "depth"],
)
async def test_many_values_are_refused_before_they_are_made(gateway: Server, body: bytes) -> None:
    """Guards against a body of some MB for which gigabytes of objects and errors are made."""
    status, _, answer = await post(gateway.port, CHAT, body)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_other_types_of_bodies_are_refused(
    gateway: Server, orchestrator: FakeOrchestrator
) -> None:
    """Guards against pages of other origins, whose forms need no permission for plain text."""
    data = request(CHAT, BODY).replace(b"application/json", b"text/plain")
    status, headers, _ = await response_to(gateway.port, data)
    assert status == 415
    assert not [name for name in headers if name.startswith("access-control")]
    for coding, status in (("gzip", 415), ("gzip, br", 415), ("identity", 200)):
        data = request(CHAT, BODY, **{"content-encoding": coding})
        answered, _, answer = await response_to(gateway.port, data)
        assert answered == status
        if status == 415:
            text = f"content-encoding {coding} is not supported: send plain JSON"
            assert answer["error"]["message"] == text
    assert len(orchestrator.requests) == 1


async def test_other_origins_only_if_they_are_set(address: str) -> None:
    origin = "https://chat.example"
    async with gateway_at(address, cors_origins=f"https://b.example, {origin}") as server:
        _, headers, _ = await post(server.port, CHAT, BODY, origin=origin)
        assert headers["access-control-allow-origin"] == origin
        # Clients in browsers repeat requests unless they can read these.
        shown = headers["access-control-expose-headers"].split(", ")
        assert {"x-should-retry", "retry-after-ms", "x-request-id"} <= {*shown}
        _, headers, _ = await post(server.port, CHAT, BODY, origin="https://other.example")
        assert "access-control-allow-origin" not in headers


async def test_a_get_ends_when_its_client_leaves(
    orchestrator: FakeOrchestrator, gateway: Server
) -> None:
    """Guards the gateway and the orchestrator against calls that no connection bounds."""
    orchestrator.holds = True
    connection = await Connection.open(gateway.port, MODELS + b"\r\n")
    await orchestrator.received.wait()
    connection.reset()
    await until(lambda: orchestrator.cancelled.is_set() and not gateway._state.tasks)


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1:1", 200), ("[::1]:1", 200), ("evil.example:1", 401)]
)
async def test_pages_whose_name_was_rebound_are_refused(
    address: str, orchestrator: FakeOrchestrator, tmp_path: Path, host: str, status: int
) -> None:
    """Guards against pages that call this port as their own origin, by a name of theirs."""
    async with gateway_at(address) as server:
        for token in ({}, {"authorization": "Bearer x"}):
            assert (await post(server.port, CHAT, BODY, host=host, **token))[0] == status
    service, path = orchestrator.service(), tokens_file(tmp_path, "x")
    async with listening(service, tokens_file=path) as checked, gateway_at(checked) as server:
        status, _, _ = await post(server.port, CHAT, BODY, host=host, authorization="Bearer x")
        assert status == 200
    async with gateway_at(address, allow_anonymous=True) as server:  # behind a proxy
        assert (await post(server.port, CHAT, BODY, host=host))[0] == 200
