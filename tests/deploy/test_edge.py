"""The real Envoy with our file, before a stack of toys: it passes answers on, and bounds its peers.

Bounds in seconds are tried on a second Envoy with shorter ones.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from deploy.local import edge
from deploy.local.processes import Processes, Program
from deploy.local.stack import Ports, Stack, replies
from specrej import Client
from specrej.contracts import Finished, errors
from specrej.telemetry.names import RPC_METHOD, RPC_STARTED
from tests import http2
from tests.certificates import Authority, place
from tests.deploy.manifests import rendered
from tests.endpoints import prometheus_name, scrape
from tests.gateway.gateways import (
    BODY,
    CHAT,
    MODELS,
    Connection,
    context,
    gateway_at,
    post,
    request,
    response_to,
)
from tests.reward_service.endpoint import Reply, served
from tests.serving import listening, need, until, until_read
from tests.specrej.conftest import orchestrator
from tests.specrej.fakes import GENERATION, FakeOrchestrator
from tests.toys import TOYS

__all__ = ["orchestrator"]  # a fixture
pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTION: dict[str, Any] = {"prompt": "Why?", "n": 4, "max_tokens": 24, "seed": 1}
BEGIN = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0, b"")
GENERATE = "/specrej.v1.OrchestratorService/Generate"
CALLS = {RPC_METHOD: GENERATE[1:]}


@pytest.fixture(scope="module")
def envoy() -> Path:
    return need(edge.FETCHED, "Envoy: make envoy fetches it")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(envoy: Path) -> AsyncIterator[Stack]:
    async with Stack(environment=TOYS, gateway=True, edge=True) as running:
        yield running


@dataclass(frozen=True)
class Edge:
    grpc: int
    http: int
    probes: int


@asynccontextmanager
async def edge_of(
    folder: Path, orchestrator: int, gateway: int, *changes: str, certified: bool = False
) -> AsyncIterator[Edge]:
    """An Envoy of its own before these ports; a change is "&silent 5s -> 1s". `certified`: it has
    TLS as the component tls gives it, with ca.crt, tls.crt and tls.key of the folder."""
    ports = Ports.free()
    own = Edge(ports.orchestrator, ports.gateway, ports.reward)
    text = edge.configuration(own.grpc, own.http, own.probes, ports.redis, [orchestrator], gateway)
    for change in changes:
        old, _, new = change.partition(" -> ")
        assert old in text
        text = text.replace(old, old.rpartition(" ")[0] + " " + new)
    if certified:
        text = _with_tls(text, folder)
    (folder / "envoy.yaml").write_text(text)
    ready = partial(replies, own.probes, _probe("/ready"), b" 200 ")
    program = Program("edge", edge.command(folder / "envoy.yaml"), ready)
    async with Processes([program], folder, start_timeout_s=20):
        yield own


def _with_tls(text: str, folder: Path) -> str:
    """As the chart does: its parts between the marks, and its files of secrets."""
    files = rendered("production").named("ConfigMap")["edge"]["data"]
    for name in ("clients", "services"):
        mark = f"# -- {name} --"
        before, _, after = text.split(mark)
        text = mark.join((before, files["envoy.yaml"].split(mark)[1], after))
    for name in ("authority.yaml", "certificate.yaml"):
        (folder / name).write_text(re.sub(r" /(tls|ca)\b", f" {folder}", files[name]))
    services, mark, admin = text.replace("/etc/envoy", str(folder)).partition("- name: admin")
    return (
        services.replace(
            "- endpoint: {address: {socket_address: {address: 127.0.0.1,",
            "- endpoint: {address: {socket_address: {address: localhost,",
        )
        + mark
        + admin
    )


def _probe(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def inner_ports(stack: Stack) -> tuple[int, int]:
    """The ports of orchestrator and gateway."""
    return int(stack.orchestrator_addresses.rpartition(":")[2]), stack.gateway_port


# Answers


async def test_answers_are_those_of_the_services(stack: Stack) -> None:
    """Guards against an edge that changes, retries or buffers."""
    inner = stack.orchestrator_addresses
    assert inner != stack.orchestrator_address
    async with Client(inner) as without, Client(stack.orchestrator_address) as behind:
        expected = await without.generate(**QUESTION)
        assert (await behind.generate(**QUESTION)).best == expected.best
        began, times = time.monotonic(), []
        async for event in behind.stream(**QUESTION, ignore_eos=True):
            times.append(time.monotonic() - began)
            last = event
        assert isinstance(last, Finished)
    assert times[-1] - times[0] > 0.15  # steps of 10 ms
    body = {**BODY, "seed": 1, "max_tokens": 24}
    status, _, answer = await post(stack.ports.gateway, CHAT, body)
    assert (status, answer["object"]) == (200, "chat.completion")
    text = answer["choices"][0]["message"]["content"]
    _, _, other = await post(inner_ports(stack)[1], CHAT, body)
    assert other["choices"][0]["message"]["content"] == text


@pytest.mark.long
async def test_the_loss_of_an_orchestrator_costs_no_request(envoy: Path) -> None:
    """Guards clients and their few attempts against an edge that uses one orchestrator only, or
    sends most calls to one that is lost, where they end at once."""
    async with (
        Stack(environment=TOYS, edge=True, orchestrators=2) as two,
        Client(two.orchestrator_address) as client,
    ):
        num_answers = 0

        async def ask(number: int) -> None:
            nonlocal num_answers
            while num_answers < 80:
                await client.generate(**QUESTION | {"seed": num_answers + 100 * number})
                num_answers += 1

        healthy = "envoy_cluster_membership_healthy"
        probes = re.search(r"probes\n.*port_value: (\d+)", (two.log_dir / "envoy.yaml").read_text())
        assert probes

        async def is_settled() -> bool:
            page = await scrape([f"http://127.0.0.1:{probes[1]}/metrics"])
            return page.sum(healthy, envoy_cluster_name="orchestrator") == 2

        # Each failed a health check, or a call, before it had started.
        await until(is_settled, bound_s=30)
        asking = [asyncio.create_task(ask(number)) for number in range(4)]
        await until(lambda: num_answers > 20, bound_s=30)
        served = [
            (await scrape([url])).sum(prometheus_name(RPC_STARTED), **CALLS)
            for url in two.metrics_urls[:2]
        ]
        assert min(served) > 2, "the case did not occur"
        psutil.Process(two.processes["orchestrator-2"]).kill()
        await asyncio.wait_for(asyncio.gather(*asking), 60)


async def test_only_public_methods_have_a_route(stack: Stack) -> None:
    reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.ports.orchestrator)
    writer.write(BEGIN + http2.unary(1, reflection))
    async with asyncio.timeout(10):
        while (await http2.read_frame(reader))[::2] != (http2.HEADERS, 1):
            pass  # the status is in the trailers-only reply: no message
    writer.close()


async def test_what_a_client_says_of_itself_is_dropped(tmp_path: Path, envoy: Path) -> None:
    """Guards against an address or a certificate that is spoofed, and a token that is lost."""
    lies = b"x-forwarded-client-cert: a\r\nx-envoy-internal: true\r\nx-envoy-max-retries: 9\r\n"
    lies += b"x-forwarded-for: 10.0.0.1\r\n"
    async with served(lambda *_: Reply(b"")) as server, edge_of(tmp_path, 1, server.port) as own:
        await response_to(own.http, MODELS + b"authorization: Bearer T\r\n" + lies + b"\r\n")
    headers = server.requests[0].headers
    assert headers["authorization"] == "Bearer T"
    assert not re.search("client-cert|internal|retries|forwarded-for", " ".join(headers))


async def test_tls_to_both_sides(
    tmp_path: Path, envoy: Path, orchestrator: FakeOrchestrator
) -> None:
    """Certificates that change are used, services' are verified, and a deadline passes."""
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    services: dict[str, Any] = first.issue("services").settings

    def certify(authority: Authority) -> None:
        pair = authority.issue("tls")
        pair.key.rename(tmp_path / "tls.key")
        pair.cert.rename(tmp_path / "tls.crt")

    certify(first)
    place(tmp_path / "ca.crt", second.path.read_bytes())
    async with (
        listening(orchestrator.service(), **services) as address,
        gateway_at(address, orchestrator_tls_ca=str(first.path), **services) as gateway,
    ):
        ports = (int(address.rpartition(":")[2]), gateway.port)
        async with edge_of(tmp_path, *ports, certified=True) as own:

            async def status(authority: Authority) -> int:
                """0: the edge's certificate is not the authority's."""
                try:
                    answer = await response_to(own.http, MODELS + b"\r\n", context(authority))
                except ssl.SSLError:
                    return 0
                return int(answer[0])

            async def until_status(expected: int, authority: Authority) -> None:
                bounds = {"bound_s": 10, "every_s": 0.05}
                await until_read(lambda: status(authority), lambda now: now == expected, **bounds)

            await until_status(503, first)  # services' certificates are of an unknown authority
            place(tmp_path / "ca.crt", first.path.read_bytes())
            await until_status(200, first)
            async with Client(
                f"127.0.0.1:{own.grpc}", tls_ca=str(first.path), timeout_s=77
            ) as client:
                assert await client.generate("Why?") == GENERATION
            assert 60 < orchestrator.times_left[0] <= 77
            certify(second)
            await until_status(200, second)


# Bounds


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (MODELS + b"x: " + b"y" * 20_000 + b"\r\n\r\n", 431, "invalid_http"),
        (MODELS + b"".join(b"x-%d: 1\r\n" % i for i in range(80)) + b"\r\n", 431, "invalid_http"),
        (request(CHAT, b"0\r\n\r\n", **{"transfer-encoding": "chunked"}), 400, "invalid_http"),
        (MODELS + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "invalid_http"),
        (MODELS + b"x_y: 1\r\n\r\n", 400, "invalid_http"),
        (request(CHAT, {**BODY, "user": "x" * (2**23 + 2**17)}), 413, "request_too_large"),
    ],
    ids=["header", "headers", "cl-te", "cl-cl", "underscore", "body"],
)
async def test_malformed_requests_end_at_the_edge(
    stack: Stack, data: bytes, status: int, code: str
) -> None:
    """In the shape of OpenAI's errors; the connection ends."""
    connection = await Connection.open(stack.ports.gateway, data)
    answered, headers, body = await connection.response()
    assert (answered, body["error"]["code"]) == (status, code)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert headers["connection"] == "close"
    connection.leave()


async def test_slow_and_silent_peers_are_cut_off(tmp_path: Path, stack: Stack) -> None:
    """Meanwhile another caller is served, and probes even at the maximum of connections."""
    bounds = ("&silent 5s -> 1.5s", "&header_s 10s -> 1s", "&request_s 30s -> 3s")
    most = "max_active_downstream_connections: 4000 -> 400"
    async with edge_of(tmp_path, *inner_ports(stack), *bounds, most) as own:
        call = BEGIN + http2.frame(
            http2.HEADERS, http2.END_HEADERS, 1, http2.headers(GENERATE, "localhost")
        )
        sent = [(own.http, MODELS), (own.http, request(CHAT, BODY)[:-1]), (own.grpc, call)]
        began = time.monotonic()
        header, body, message = [await Connection.open(port, data) for port, data in sent]
        silent = [await Connection.open(own.http) for _ in range(300)]
        assert (await response_to(own.http, MODELS + b"\r\n"))[0] == 200
        times = []
        for peer in (header, body):
            status, _, answer = await peer.response()
            times.append(time.monotonic() - began)
            assert (status, answer["error"]["code"]) == (408, "invalid_http")
        assert times[0] < 2.9 < times[1]
        async with asyncio.timeout(10):
            while (frame := await http2.read_frame(message.reader))[2] != 1:
                pass
        assert frame[:2] == (http2.HEADERS, http2.END_STREAM | http2.END_HEADERS)
        assert [await peer.read_all() for peer in silent] == [b""] * 300
        assert time.monotonic() - began < 10  # Envoy's own bound of silence is 15 s
        more = [await Connection.open(own.http) for _ in range(450)]
        for path in ("/ready", "/metrics"):
            assert await replies(own.probes, _probe(path), b" 200 ")
        for peer in (*more, header, body, message):
            peer.leave()


async def test_each_peer_has_a_rate(tmp_path: Path, stack: Stack) -> None:
    async with edge_of(
        tmp_path, *inner_ports(stack), "max_tokens: 256, -> 3,", "tokens_per_fill: 100, -> 1,"
    ) as own:
        answers = [await response_to(own.http, MODELS + b"\r\n") for _ in range(8)]
        status, headers, body = answers[-1]
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["retry-after"]) >= 1
        other = await asyncio.open_connection("127.0.0.1", own.http, local_addr=("127.0.0.2", 0))
        other[1].write(MODELS + b"\r\n")
        assert (await Connection(*other).response())[0] == 200
        other[1].close()
        async with Client(f"127.0.0.1:{own.grpc}") as client:
            with pytest.raises(errors.Overloaded):
                for _ in range(8):
                    await client.describe()


async def test_a_reader_that_does_not_read_is_cut_off(tmp_path: Path, envoy: Path) -> None:
    """Guards against a reply that is held for hours."""
    async with (
        served(lambda *_: Reply(bytes(30_000_000))) as server,
        edge_of(tmp_path, 1, server.port, "&unread 60s -> 1s") as own,
    ):
        with socket.create_connection(("127.0.0.1", own.http)) as peer:
            peer.sendall(MODELS + b"\r\n")
            await until(lambda: server.num_gone == 1, bound_s=10)
