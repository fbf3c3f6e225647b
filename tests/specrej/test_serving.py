"""Every port: malformed messages, bugs, reflection, limits, and the life of a server."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deploy.local.stack import Ports
from specrej.client.channel import open_channel
from specrej.contracts import status, wire
from specrej.contracts.errors import InternalError, Violation
from specrej.contracts.validation import MAX_METADATA_BYTES
from specrej.server import interceptor
from specrej.server.serving import LIVENESS, Context, Server, Service
from specrej.settings import ServiceSettings
from specrej.v1 import orchestrator_pb2
from specrej.v1.orchestrator_pb2 import OrchestratorServiceScoreRequest
from specrej.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.certificates import Authority, place, token_line
from tests.serving import failure_of, health_of, listening, reason_of, serving, until
from tests.specrej.fakes import GENERATION, FakeOrchestrator

BOUND_S = 20.0
LIMIT_BYTES = 4096
_GARBAGE = b"\xff" * 16
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        _REFLECTION,
        "/specrej.v1.OrchestratorService/Generate",
    ],
)
async def test_malformed_message_is_an_invalid_argument(
    channel: grpc.aio.Channel, method: str
) -> None:
    """Guards against UNKNOWN with the name of a class for a malformed message."""
    call: Any = channel.stream_stream(method)(timeout=BOUND_S)
    await call.write(_GARBAGE)
    await call.done_writing()
    error = await failure_of(call.read)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) == "INVALID_REQUEST"


async def test_a_bug_is_opaque_and_logged(
    channel: grpc.aio.Channel, orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against prompts and paths in errors, and an error that no log line explains."""
    orchestrator.failures = [RuntimeError("secret")]
    stub: Any = OrchestratorServiceStub(channel)
    error = await failure_of(stub.Generate(orchestrator_pb2.GenerateRequest()))
    text = str(error.details())
    assert error.code() is grpc.StatusCode.INTERNAL and "secret" not in text
    assert text.removeprefix("internal error ") in caplog.text


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    """Guards its stream, which is wrapped for the sake of its statuses."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stub.ServerReflectionInfo([request, request])]
    for answer in answers:
        names = {service.name for service in answer.list_services_response.service}
        assert "specrej.v1.OrchestratorService" in names
    assert len(answers) == 2


@pytest.fixture
async def stub(orchestrator: FakeOrchestrator) -> AsyncIterator[Any]:
    async with serving(orchestrator.service(), max_message_bytes=LIMIT_BYTES) as channel:
        yield OrchestratorServiceStub(channel)


def message_of(size: int) -> OrchestratorServiceScoreRequest:
    """A request of this number of bytes."""
    message = OrchestratorServiceScoreRequest(responses=["x" * (size - 3)])
    assert message.ByteSize() == size
    return message


async def test_message_above_the_limit_is_refused(
    stub: Any, orchestrator: FakeOrchestrator
) -> None:
    """Guards against an inexact limit, and against an oversized message reaching a handler."""
    await stub.Score(message_of(LIMIT_BYTES), timeout=10)
    failure = await failure_of(stub.Score(message_of(LIMIT_BYTES + 1), timeout=10))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(orchestrator.scored) == 1
    await stub.Score(message_of(LIMIT_BYTES), timeout=10)  # on the same connection


async def test_a_refused_message_is_free_before_its_status_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the memory against clients that send many empty items, and read no status."""
    parsed: list[weakref.ref[Any]] = []
    alive: list[Any] = []

    class Parsed:
        def __init__(self, _: bytes) -> None:
            parsed.append(weakref.ref(self))

    def to_status(error: Any) -> Any:
        alive.extend(one() for one in parsed)
        return status.to_status(error)

    async def handle(*_: Any) -> None:
        pytest.fail("was not refused")

    def register(server: grpc.aio.Server) -> None:
        handler: Any = handle
        calls = {"Call": grpc.unary_unary_rpc_method_handler(handler, Parsed)}
        server.add_registered_method_handlers("specrej.test.Parsing", calls)

    monkeypatch.setattr(interceptor, "check_lengths", lambda _: [Violation("field", "is long")])
    monkeypatch.setattr(interceptor, "to_status", to_status)
    async with serving(Service("specrej.test.Parsing", register)) as channel:
        call: Any = channel.unary_unary("/specrej.test.Parsing/Call")
        error = await failure_of(call(b"", timeout=BOUND_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert alive == [None]


async def test_messages_of_many_items_are_refused_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the memory and the event loop, which a message of a million empty turns would take."""

    async def handle(*_: Any) -> None:
        pytest.fail("was not refused")

    def register(server: grpc.aio.Server) -> None:
        handler: Any = handle
        parse = orchestrator_pb2.GenerateRequest.FromString
        calls = {"Call": grpc.unary_unary_rpc_method_handler(handler, parse)}
        server.add_registered_method_handlers("specrej.v1.Parsing", calls)

    monkeypatch.setattr(interceptor, "check_lengths", lambda _: pytest.fail("was parsed"))
    request = orchestrator_pb2.GenerateRequest(model="x" * (1 << 16))
    for _ in range(1025):
        request.prompt.messages.add()
    async with serving(Service("specrej.v1.Parsing", register)) as channel:
        call: Any = channel.unary_unary("/specrej.v1.Parsing/Call")
        error = await failure_of(call(request.SerializeToString(), timeout=BOUND_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt.messages" in (error.details() or "")


async def test_metadata_above_the_limit_is_refused(
    stub: Any, orchestrator: FakeOrchestrator
) -> None:
    """Guards against grpc's random refusals between two limits, and a broken connection."""
    request = message_of(256)
    # grpc's own metadata takes some hundred bytes.
    for _ in range(4):
        await stub.Score(
            request, timeout=10, metadata=[("x-large", "v" * (MAX_METADATA_BYTES - 1024))]
        )
    for _ in range(4):
        call = stub.Score(request, timeout=10, metadata=[("x-large", "v" * MAX_METADATA_BYTES)])
        assert (await failure_of(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(orchestrator.scored) == 4
    await stub.Score(request, timeout=10)


# Health and drains


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


async def until_health(server: Server, readiness: str = "", liveness: str = "") -> None:
    """Wait for these serving statuses; empty: any."""

    async def is_reached() -> bool:
        pairs = ((readiness, ""), (liveness, LIVENESS))
        return all([not h or await health_of(address(server), name) == h for h, name in pairs])

    await until(is_reached)


@asynccontextmanager
async def running(
    server: Server, loaded: asyncio.Event | None = None
) -> AsyncIterator[tuple[asyncio.Task[None], grpc.aio.Channel]]:
    """Run a server; end it by SIGTERM, if it still runs. `loaded`: the end of its warm-up."""

    async def warm_up() -> None:
        if loaded:
            await loaded.wait()

    task = asyncio.create_task(server.run(warm_up))
    await until(lambda: server.port != 0)
    async with open_channel(address(server)) as channel:
        try:
            yield task, channel
        finally:
            if not task.done():
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(task, BOUND_S)


async def test_health_follows_the_heartbeat(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a process that answers while its engine hangs or has ended, and is never
    restarted; and against a recovery logged as an error."""
    age_s = [0.0]
    server = Server(ServiceSettings(stuck_s=0.2), [])
    server.watch(lambda: age_s[0])
    async with running(server) as (task, _):
        await until_health(server, "SERVING", "SERVING")
        age_s[0] = 1e9
        await until_health(server, "NOT_SERVING", "NOT_SERVING")
        with caplog.at_level("INFO", "specrej.server.serving"):
            age_s[0] = 0.0
            await until_health(server, "SERVING", "SERVING")
        levels = [r.levelname for r in caplog.records if "serving" in r.message]
        assert levels[-2:] == ["ERROR", "INFO"]
        age_s[0] = math.inf
        with pytest.raises(RuntimeError, match="a compute thread has ended"):
            await asyncio.wait_for(task, BOUND_S)


@pytest.mark.parametrize("fails", [True, False])
async def test_a_server_that_was_never_ready_ends_without_a_drain(fails: bool) -> None:
    """Guards against seconds before the error of each start that fails."""
    server = Server(ServiceSettings(drain_s=300), [])

    async def warm_up() -> None:
        if fails:
            raise OSError("no model")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(OSError, match="no model") if fails else nullcontext():
        await asyncio.wait_for(server.run(warm_up), BOUND_S)


async def test_a_loading_server_is_alive_and_ends_on_sigterm() -> None:
    """Guards a slow start against a liveness probe that kills it again and again."""
    server = Server(ServiceSettings(), [])
    async with running(server, asyncio.Event()):
        await until_health(server, "NOT_SERVING", "SERVING")


async def test_a_drain_sets_not_serving_first_and_a_second_signal_ends_it() -> None:
    """Guards requests on their way: they would fail if refused before health is NOT_SERVING. Guards
    a drain against a supervisor that stops what is not alive."""
    server = Server(ServiceSettings(drain_s=300), [])
    async with running(server) as (task, _):
        await until_health(server, "SERVING")
        os.kill(os.getpid(), signal.SIGTERM)
        await until_health(server, "NOT_SERVING", "SERVING")  # it still answers
        server.set_serving(True)  # as after a recovery
        assert await health_of(address(server)) == "NOT_SERVING"
        assert not task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, BOUND_S)


@pytest.mark.parametrize("method", ["Watch", "Check"])
async def test_an_open_health_check_does_not_delay_a_drain(method: str) -> None:
    """Guards restarts against calls that never end: one that watches, one that sends no message."""
    server = Server(ServiceSettings(grace_s=300), [])
    async with running(server) as (task, channel):
        call: Any = channel.stream_stream(f"/grpc.health.v1.Health/{method}")()
        if method == "Watch":
            await call.write(b"")
            await call.read()
        else:
            await call.wait_for_connection()
            # A later call on the same connection: the server has received the first one.
            later: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            await later(b"", timeout=BOUND_S)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, BOUND_S)


async def test_a_drain_waits_for_running_calls(
    orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards requests against a drain that ends once all other calls have ended."""
    monkeypatch.setattr("specrej.server.serving._SETTLING_S", 0.001)
    server = Server(ServiceSettings(grace_s=300), [orchestrator.service()])
    orchestrator.hangs = True
    async with running(server) as (_, channel):
        stub: Any = OrchestratorServiceStub(channel)
        call = asyncio.ensure_future(stub.Generate(orchestrator_pb2.GenerateRequest()))
        await asyncio.wait_for(orchestrator.received.wait(), BOUND_S)
        orchestrator.failures = [InternalError("the end of another call")]
        await failure_of(stub.Generate(orchestrator_pb2.GenerateRequest()))
        stopping = asyncio.ensure_future(server.stop())
        await until_health(server, "UNAVAILABLE")
        for _ in range(20):  # long after all other calls have ended
            assert await health_of(address(server)) == "UNAVAILABLE"
        orchestrator.released.set()
        assert await call == wire.generation_to_message(GENERATION)
        await asyncio.wait_for(stopping, BOUND_S)


class IgnoringCancellation(FakeOrchestrator):
    """Does not end when it is cancelled, like a call that waits for a hanging step."""

    async def Generate(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.received.set()
        while not self.released.is_set():
            with suppress(asyncio.CancelledError):
                await self.released.wait()
        return wire.generation_to_message(GENERATION)


async def test_a_hanging_call_does_not_delay_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards restarts against a step that hangs: the platform had to kill the process."""
    monkeypatch.setattr("specrej.server.serving._ENDING_S", 0.01)
    hanging = IgnoringCancellation()
    server = Server(ServiceSettings(grace_s=0.01), [hanging.service()])
    async with running(server) as (task, channel):
        stub: Any = OrchestratorServiceStub(channel)
        call = stub.Generate(orchestrator_pb2.GenerateRequest())
        try:
            await asyncio.wait_for(hanging.received.wait(), BOUND_S)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(task, BOUND_S)
        finally:
            hanging.released.set()
            call.cancel()
        await server.stop()


# The health port beside a port with TLS and tokens, as a probe without TLS sees it


ORCHESTRATOR = "specrej.v1.OrchestratorService"
HOST = "127.0.0.1"


@asynccontextmanager
async def secured(folder: Path, **settings: Any) -> AsyncIterator[tuple[str, str]]:
    """The addresses of the main port, with TLS and tokens, and of the health port."""
    port, tokens = Ports.free().generator, folder / "tokens"
    place(tokens, token_line("acme", "acme-token"))
    pair = Authority(folder).issue().settings
    files: dict[str, Any] = {"tokens_file": str(tokens), "health_port": port, **pair}
    async with listening(FakeOrchestrator().service(), **files, **settings) as address:
        yield address, f"{HOST}:{port}"


async def test_probes_without_tls_see_the_state_and_nothing_else(tmp_path: Path) -> None:
    """Guards against probes that need TLS or a token, a plaintext port with other services, and
    a port that outlives its server."""
    async with secured(tmp_path) as (main, probes):
        assert await health_of(probes, ORCHESTRATOR) == "SERVING"
        assert await health_of(probes, "other") == "NOT_FOUND"
        assert await health_of(main) == "UNAVAILABLE"  # plaintext
        port = main.rpartition(":")[2]
        ca = tmp_path / "ca.pem"
        assert await health_of(f"localhost:{port}", tls_ca=ca) == "SERVING"
        async with grpc.aio.insecure_channel(probes) as channel:
            for method in (f"/{ORCHESTRATOR}/Describe", _REFLECTION):
                call: Any = channel.unary_unary(method)
                assert (await failure_of(call(b""))).code() == grpc.StatusCode.UNIMPLEMENTED
    assert await health_of(probes) == "UNAVAILABLE"


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_the_host_may_be_an_ipv6_address(host: str) -> None:
    """Guards against a port that seems to be taken."""
    server = Server(ServiceSettings(host=host, port=0), [])
    try:
        await server.start()
        assert server.port
    finally:
        await server.stop(0)


async def test_a_taken_health_port_raises() -> None:
    """Guards against a service without the port that its probes need."""
    with socket.create_server((HOST, 0)) as taken:
        server = Server(ServiceSettings(health_port=taken.getsockname()[1]), [])
        try:
            with pytest.raises(OSError, match="cannot listen on"):
                await server.start()
        finally:
            await server.stop(0)
