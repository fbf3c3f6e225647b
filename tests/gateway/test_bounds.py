"""What a client may hold by being slow, silent, large or many; TLS; the process's life."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from gateway import __main__ as gateway_main
from gateway import connection
from gateway.__main__ import Server
from specrej import wire
from specrej.contracts import Finished, Generation
from tests.certificates import Authority, place
from tests.endpoints import scrape
from tests.gateway.gateways import BODY, Connection, gateway_at, get, post, request, response_to
from tests.serving import listening, until
from tests.specrej.fakes import EVENTS, GENERATION, FakeOrchestrator

CHAT = "/v1/chat/completions"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
STREAM = {**BODY, "stream": True}
MAX_BYTES_OF_STREAMS = 60 * 2**20


def connections(server: Server) -> int:
    return len(server._state.connections)


def only_connection(server: Server) -> connection.Connection:
    (served,) = server._state.connections
    assert isinstance(served, connection.Connection)
    return served


@pytest.mark.parametrize("sent", [b"", b"GET /v1/mod", MODELS])
async def test_headers_have_a_time(address: str, sent: bytes) -> None:
    """Guards against connections that are held by a header that never ends."""
    async with gateway_at(address, header_s=0.2) as server:
        connection = await Connection.open(server.port, sent)
        assert await connection.read_all() == b""
        await until(lambda: connections(server) == 0)


async def test_headers_of_a_second_request_have_a_time(address: str) -> None:
    async with gateway_at(address, header_s=0.2) as server:
        connection = await Connection.open(server.port, MODELS + b"\r\n")
        assert (await connection.response())[0] == 200
        connection.writer.write(b"GET /v1")
        assert await connection.read_all() == b""


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["incomplete", "complete"])
async def test_headers_have_a_size(address: str, end: bytes) -> None:
    async with gateway_at(address, max_header_bytes=2048) as server:
        connection = await Connection.open(server.port, MODELS + b"x: " + b"y" * 4096 + end)
        status, headers, body = await connection.response()
        assert (status, body["error"]["code"]) == (400, "invalid_http")
        assert headers["connection"] == "close"
        assert await connection.read_all() == b""


async def test_a_token_has_a_size(address: str) -> None:
    """Guards against a status that invites to retry: grpc refuses its metadata as too large."""
    async with gateway_at(address) as server:
        status, _, body = await get(
            server.port, "/v1/models", f"authorization: Bearer {'x' * 15_000}"
        )
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_answers_are_converted_off_the_event_loop(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards other calls against an answer of many candidates with many log-probabilities."""
    are_on_loop: list[bool] = []
    converted: list[Generation] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            are_on_loop.append(threading.current_thread() is threading.main_thread())
            converted.extend(value for value in arguments if isinstance(value, Generation))
            return function(*arguments)

        return call

    monkeypatch.setattr(wire, "generation_from_message", noted(wire.generation_from_message))
    monkeypatch.setattr(wire, "to_plain", noted(wire.to_plain))
    async with gateway_at(address) as server:
        assert (await post(server.port, CHAT, BODY))[0] == 200
        streamed = {**STREAM, "stream_options": {"include_usage": True}}
        stream = await Connection.open(server.port, request(CHAT, streamed, connection="close"))
        assert b"[DONE]" in await stream.read_all()
    assert len(are_on_loop) == 4 and not any(are_on_loop)
    assert [(len(answer.candidates), answer.rounds) for answer in converted] == 2 * [(1, ())]


async def test_invalid_requests_leave_no_log(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against callers that fill the log."""
    async with gateway_at(address) as server:
        assert (await response_to(server.port, b"\0\r\n\r\n"))[0] == 400
    assert not caplog.records


async def test_bodies_have_a_time_and_a_size(
    address: str, orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_at(address, body_s=0.2, max_body_bytes=2048) as server:
        late = await Connection.open(server.port, request(CHAT, BODY)[:-1])
        assert (await late.response())[0] == 408
        assert await late.read_all() == b""
        long = await Connection.open(server.port, request(CHAT, {**BODY, "user": "x" * 4096}))
        assert (await long.response())[0] == 413
        assert await long.read_all() == b""
        monkeypatch.setattr(connection, "_BODIES", 0)
        assert (await post(server.port, CHAT, BODY))[0] == 200  # small ones are always read
        monkeypatch.setattr(connection, "_SMALL_BODY", 0)
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
async def test_many_values_are_refused_before_they_are_made(address: str, body: bytes) -> None:
    """Guards against a body of some MB for which gigabytes of objects and errors are made."""
    async with gateway_at(address) as server:
        status, _, answer = await post(server.port, CHAT, body)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_signs_of_texts_are_no_values(address: str) -> None:
    text = ', [{ \\" \\\\ ' * 30_000
    messages = [{"role": "user", "content": text}]
    async with gateway_at(address) as server:
        assert (await post(server.port, CHAT, {**BODY, "messages": messages}))[0] == 200


async def test_other_types_of_bodies_are_refused(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against pages of other origins, whose forms need no permission for plain text."""
    async with gateway_at(address) as server:
        data = request(CHAT, BODY).replace(b"application/json", b"text/plain")
        status, headers, _ = await response_to(server.port, data)
        assert status == 415
        assert not [name for name in headers if name.startswith("access-control")]
    assert not orchestrator.requests


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


async def test_a_pipelined_request_ends_its_connection(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against requests that go on after their client left: uvicorn stops to read."""
    orchestrator.hangs = True
    async with gateway_at(address) as server:
        connection = await Connection.open(server.port, request(CHAT, BODY))
        await orchestrator.received.wait()
        connection.writer.write(request(CHAT, BODY))
        await asyncio.wait_for(orchestrator.cancelled.wait(), 20)
        assert await connection.read_all() == b""
        at_once = await Connection.open(server.port, 2 * request(CHAT, BODY))
        assert await at_once.read_all() == b""


async def test_an_idle_connection_makes_room(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards health checks, and with them the process, against clients that keep connections."""
    async with gateway_at(address, max_connections=2) as server:
        kept = await Connection.open(server.port, request(CHAT, BODY))
        assert (await kept.response())[0] == 200
        orchestrator.hangs = True
        busy = await Connection.open(server.port, request(CHAT, BODY))
        await orchestrator.received.wait()
        assert (await get(server.port, "/healthz"))[0] == 200
        assert await kept.read_all() == b"" and not busy.reader.at_eof()
        busy.leave()


class Silent(FakeOrchestrator):
    """Never answers Describe."""

    num_running = 0

    async def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.num_running += 1
        self.received.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.num_running -= 1


async def test_a_get_ends_when_its_client_leaves() -> None:
    """Guards the gateway and the orchestrator against calls that no connection bounds."""
    silent = Silent()
    async with listening(silent.service()) as address, gateway_at(address) as server:
        connection = await Connection.open(server.port, MODELS + b"\r\n")
        await silent.received.wait()
        connection.reset()
        await until(lambda: not silent.num_running and not server._state.tasks)


async def test_connections_have_a_number(address: str) -> None:
    async with gateway_at(address, max_connections=2) as server:
        held = [await Connection.open(server.port) for _ in range(2)]
        await until(lambda: connections(server) == 2)
        refused = await Connection.open(server.port)
        status, headers, body = await refused.response()
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert headers["retry-after"] == "1"
        assert await refused.read_all() == b""
        held[0].leave()
        await until(lambda: connections(server) == 1)
        assert (await post(server.port, CHAT, BODY))[0] == 200
        held[1].leave()


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_an_unread_reply_has_a_time(
    address: str, orchestrator: FakeOrchestrator, body: dict[str, Any]
) -> None:
    """Guards against a client that holds a connection and its reply by not reading."""
    holding(orchestrator)
    if "stream" not in body:
        body = {**body, "stream": True, "specrej": {"events": "rounds"}}
    async with gateway_at(address, unread_s=0.3) as server:
        connection = await Connection.open(server.port, request(CHAT, body))
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: connections(server) == 1)
        await until(lambda: connections(server) == 0)
        connection.leave()


def holding(orchestrator: FakeOrchestrator) -> None:
    """Make answers larger than what the sockets' buffers take."""
    large = replace(GENERATION.candidates[0], text="x" * 20_000_000)
    orchestrator.answer = replace(GENERATION, candidates=(large,))
    orchestrator.events = (EVENTS[0], Finished(orchestrator.answer))


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_slow_reader_gets_its_reply(
    address: str, orchestrator: FakeOrchestrator, tmp_path: Path, *, is_tls: bool
) -> None:
    """Guards against a large answer that is cut, and repeated, though its client reads on."""
    holding(orchestrator)
    authority = Authority(tmp_path)
    pair = authority.issue()
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)} if is_tls else {}
    tls = context(authority) if is_tls else None
    async with gateway_at(address, unread_s=600, **settings) as server:
        client = Connection(*await asyncio.open_connection("localhost", server.port, ssl=tls))
        client.writer.write(request(CHAT, BODY))
        await until(lambda: connections(server) == 1)
        served = only_connection(server)
        await client.read_until(b"\r\n\r\n")
        await until(lambda: served._num_unsent() > 0 and not served._is_answering)
        served.timeout_keep_alive_handler()
        for _ in range(2):
            left = served._num_unsent()
            while served._num_unsent() == left:
                assert await client.reader.read(2**20)
            assert served._reader_timer
            served._reader_timer._run()  # `unread_s` later
            assert served._reader_timer and not served.transport.is_closing()

        def is_cut() -> bool:
            if served._reader_timer:
                served._reader_timer._run()
            return connections(server) == 0

        await until(is_cut)
        client.leave()


async def test_a_stopping_gateway_waits_for_readers(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against an answer that is cut though its request has finished in time."""
    holding(orchestrator)
    async with gateway_at(address) as server:
        client = await Connection.open(server.port, request(CHAT, BODY))
        head = await client.read_until(b"\r\n\r\n")
        served = only_connection(server)
        await until(lambda: served._num_unsent() > 0 and not served._is_answering)
        stopping = asyncio.create_task(server.stop(60))
        body = await client.read_all(60)
        assert b"content-length: %d\r\n" % len(body) in head
        await stopping


async def test_a_stream_that_is_written_is_no_unread_reply(
    address: str, orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the end of a stream whose client reads: what is unsent may grow meanwhile."""
    orchestrator.hangs = True
    async with gateway_at(address) as server:
        client = await Connection.open(server.port, request(CHAT, STREAM))
        await orchestrator.received.wait()
        served = only_connection(server)
        monkeypatch.setattr(served, "_num_unsent", lambda: 6000)
        served._await_reader(5000)
        assert served._reader_timer and not served.transport.is_closing()
        served.pause_writing()
        served._await_reader(5000)
        assert served.transport.is_closing()
        client.leave()


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_second_request_does_not_excuse_an_unread_reply(
    address: str, orchestrator: FakeOrchestrator, tmp_path: Path, *, is_tls: bool
) -> None:
    """Guards against replies that are held without a bound: the second one waits for the first."""
    holding(orchestrator)
    authority = Authority(tmp_path)
    pair = authority.issue()
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)} if is_tls else {}
    tls = context(authority) if is_tls else None
    async with gateway_at(address, unread_s=0.3, **settings) as server:
        client = Connection(*await asyncio.open_connection("localhost", server.port, ssl=tls))
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(request(CHAT, BODY))
        await until(lambda: connections(server) == 1)
        served = only_connection(server)
        await until(lambda: served._num_unsent() > 0 and not served._is_answering)
        client.writer.write(request(CHAT, BODY))
        await until(lambda: connections(server) == 0)
        client.leave()


# TLS


def context(authority: Authority, **pair: Any) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=authority.path)
    if pair:
        made.load_cert_chain(pair["cert"], pair["key"])
    return made


async def get_models(port: int, tls: ssl.SSLContext) -> int:
    reader, writer = await asyncio.open_connection("localhost", port, ssl=tls)
    connection = Connection(reader, writer)
    try:
        writer.write(MODELS + b"\r\n")
        return (await connection.response())[0]
    finally:
        writer.transport.abort()


async def test_tls_with_certificates_that_change(address: str, tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    pair = first.issue()
    async with gateway_at(address, tls_cert=str(pair.cert), tls_key=str(pair.key)) as server:
        assert await get_models(server.port, context(first)) == 200
        second.issue()
        assert await get_models(server.port, context(second)) == 200
        with pytest.raises(ssl.SSLError):
            await get_models(server.port, context(first))
        plain = await Connection.open(server.port, MODELS + b"\r\n")
        assert await plain.read_all() == b""


async def test_mutual_tls_with_names(address: str, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair, good = authority.issue(), authority.issue("good", "front.example")
    settings = {
        "tls_cert": str(pair.cert),
        "tls_key": str(pair.key),
        "tls_client_ca": str(authority.path),
        "allowed_clients": "front.example",
    }
    async with gateway_at(address, **settings) as server:
        tls = context(authority, cert=good.cert, key=good.key)
        assert await get_models(server.port, tls) == 200
        for refused in (pair, authority.issue("nameless", nameless=True)):
            unnamed = context(authority, cert=refused.cert, key=refused.key)
            assert await get_models(server.port, unnamed) == 403
        foreign = other.issue("foreign", "front.example")
        for cut in (context(authority), context(authority, cert=foreign.cert, key=foreign.key)):
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await get_models(server.port, cut)


def status_line(
    port: int, tls: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[bytes, ssl.SSLSession | None]:
    """The answer's first line to a health check, and the TLS session; empty: refused."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        try:
            with tls.wrap_socket(raw, server_hostname="localhost", session=session) as wrapped:
                wrapped.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                return wrapped.recv(4096).split(b"\r\n")[0], wrapped.session
        except OSError:
            return b"", None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_outlives_its_authority(
    address: str, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Guards against clients of a removed authority that resume their sessions."""
    removed, other = Authority(tmp_path, "removed"), Authority(tmp_path, "other")
    pair, client = removed.issue(), removed.issue("client")
    authorities = tmp_path / "clients.pem"
    place(authorities, removed.path.read_bytes())
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    async with gateway_at(address, **settings, tls_client_ca=str(authorities)) as server:
        tls = context(removed, cert=client.cert, key=client.key)
        tls.maximum_version = version
        first, session = await asyncio.to_thread(status_line, server.port, tls)
        assert first == b"HTTP/1.1 200 OK"
        place(authorities, other.path.read_bytes())
        again, _ = await asyncio.to_thread(status_line, server.port, tls, session)
        assert again == b""


# The process


@asynccontextmanager
async def process(address: str, **settings: str) -> AsyncIterator[tuple[Process, int]]:
    """A gateway's process that is ready, and its port."""
    names = {f"SPECREJ_GATEWAY_{name.upper()}": value for name, value in settings.items()}
    environment = {**os.environ, "SPECREJ_GATEWAY_ORCHESTRATOR_ADDRESS": address, **names}
    environment["SPECREJ_GATEWAY_PORT"] = "0"
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway"), stderr=PIPE, env=environment
    )
    assert started.stderr
    try:
        async with asyncio.timeout(60):
            while b"listening on" not in (line := await started.stderr.readline()):
                assert line, "it ended"
        port = int(line.rpartition(b":")[2])

        async def is_ready() -> bool:
            return bool((await get(port, "/readyz"))[0] == 200)

        await until(is_ready)
        yield started, port
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_idle_streams_are_small(address: str, orchestrator: FakeOrchestrator) -> None:
    """200 of them take at most 60 MiB, and nothing after they left."""
    orchestrator.hangs = True
    async with process(address) as (running, port):
        first = await Connection.open(port, request(CHAT, STREAM))
        await first.read_until(b'"assistant"')
        before = psutil.Process(running.pid).memory_info().rss
        streams = [await Connection.open(port, request(CHAT, STREAM)) for _ in range(200)]
        for stream in streams:
            await stream.read_until(b'"assistant"')
        grown = psutil.Process(running.pid).memory_info().rss - before
        assert 0 < grown <= MAX_BYTES_OF_STREAMS
        for stream in (first, *streams):
            stream.leave()

        async def all_left() -> bool:
            values = await scrape([f"http://127.0.0.1:{port}/metrics"])
            return values.sum("http_server_active_requests", http_route=CHAT) == 0

        await until(all_left)


async def test_sigterm_lets_requests_finish(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against answers that are lost in a rollout, and a process that ends by a signal."""
    orchestrator.hangs = True
    async with process(address) as (running, port):
        stream = await Connection.open(port, request(CHAT, STREAM))
        await orchestrator.received.wait()
        running.send_signal(signal.SIGTERM)

        async def refuses() -> bool:
            try:
                (await Connection.open(port)).leave()
            except ConnectionError:
                return True
            return False

        await until(refuses)
        orchestrator.released.set()
        assert b"[DONE]" in await stream.read_all()
        assert await asyncio.wait_for(running.wait(), 20) == 0


async def test_a_second_signal_ends_it_at_once(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    orchestrator.hangs = True
    async with process(address) as (running, port):
        stream = await Connection.open(port, request(CHAT, STREAM))
        await orchestrator.received.wait()
        running.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.wait(), 0.3)
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 20) == 0
        assert b"[DONE]" not in await stream.read_all()
        await asyncio.wait_for(orchestrator.cancelled.wait(), 20)


async def test_it_is_ready_only_with_an_orchestrator() -> None:
    async with gateway_at("127.0.0.1:1") as server:
        assert (await get(server.port, "/readyz"))[0] == 503
        status, headers, _ = await post(server.port, CHAT, BODY)
        assert (status, headers["x-should-retry"]) == (503, "false")


async def test_a_taken_port_and_a_bad_setting_stop_the_process(address: str) -> None:
    async with gateway_at(address) as server:
        for variables, text in (
            ({"PORT": str(server.port)}, b"gateway: "),
            ({"ORCHESTRATOR_TLS_CA": "/missing"}, b"orchestrator_*"),
            ({"KEEP_ALIVE_S": "0"}, b"bad setting keep_alive_s"),
        ):
            names = {f"SPECREJ_GATEWAY_{name}": value for name, value in variables.items()}
            ended = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway"), stderr=PIPE, env={**os.environ, **names}
            )
            _, errors = await asyncio.wait_for(ended.communicate(), 60)
            assert ended.returncode
            assert text in errors


@pytest.mark.parametrize("path", [CHAT, "/nowhere"])
async def test_bodies_in_tiny_chunks_are_refused(path: str, address: str) -> None:
    """Guards the event loop: a chunk of one byte takes as long to parse as one of 64 KiB."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunks = head.encode() + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000
    async with gateway_at(address) as server:
        sent = await Connection.open(server.port, chunks)
        assert b'"invalid_http"' in await sent.read_all()


# asyncio leaves the closing of refused sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_handshakes_count_as_connections(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the process's descriptors against connections that begin no handshake."""
    monkeypatch.setattr(gateway_main, "_HANDSHAKE_S", 1.0)
    authority = Authority(tmp_path)
    pair = authority.issue("gateway")
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "max_connections": 4}
    async with gateway_at(address, **settings) as server:
        silent = [await Connection.open(server.port) for _ in range(12)]

        def num_open() -> int:
            held = [c for c in psutil.Process().net_connections() if c.laddr.port == server.port]
            return sum(connection.status == "ESTABLISHED" for connection in held)

        await until(lambda: num_open() <= 4)
        for connection in silent:
            connection.leave()
        trusted = ssl.create_default_context(cafile=authority.path)

        async def is_accepted() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusted)
            except ConnectionError:
                return False
            writer.close()
            return True

        await until(is_accepted)


# asyncio leaves the closing of refused sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_handshakes_and_connections_have_one_bound(address: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("gateway")
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "max_connections": 4}
    trusted = ssl.create_default_context(cafile=authority.path)
    async with gateway_at(address, **settings) as server:
        streams = [
            await asyncio.open_connection("localhost", server.port, ssl=trusted) for _ in range(3)
        ]
        await until(lambda: connections(server) == 3)
        silent = [await Connection.open(server.port) for _ in range(4)]
        await until(lambda: sum(connection.reader.at_eof() for connection in silent) == 3)
        for connection in silent:
            connection.leave()
        for _, writer in streams:
            writer.close()


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1:1", 200), ("[::1]:1", 200), ("evil.example:1", 401)]
)
async def test_pages_whose_name_was_rebound_are_refused(
    address: str, host: str, status: int
) -> None:
    """Guards against pages that call this port as their own origin, by a name of theirs."""
    async with gateway_at(address) as server:
        assert (await post(server.port, CHAT, BODY, host=host))[0] == status
    async with gateway_at(address, allow_anonymous=True) as server:  # behind a proxy
        assert (await post(server.port, CHAT, BODY, host=host))[0] == 200
