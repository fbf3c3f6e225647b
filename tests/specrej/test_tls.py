"""Real handshakes with real certificates: rotation, mutual TLS, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from specrej import Client, RewardClient, errors, wire
from specrej.channel import open_blocking_channel
from specrej.credentials import Credentials, TLSFiles
from specrej.serving import Context
from specrej.v1 import orchestrator_pb2, reward_pb2
from specrej.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server
from specrej.v1.reward_pb2_grpc import (
    RewardServiceStub,
    add_RewardServiceServicer_to_server,
)
from tests.certificates import Authority, Pair, place
from tests.specrej.fakes import FakeOrchestrator, FakeReward, serve


class PatientOrchestrator(FakeOrchestrator):
    """Goes on after the first event when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def GenerateStream(  # type: ignore[override]  # noqa: N802 - the name of the rpc
        self, request: orchestrator_pb2.GenerateStreamRequest, context: Context
    ) -> None:
        first, *others = self.events
        await context.write(wire.event_to_wire(first))
        await self.go_on.wait()
        for event in others:
            await context.write(wire.event_to_wire(event))


class CuriousReward(FakeReward):
    """Remembers the certificates that it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[bytes] = []

    async def Describe(  # noqa: N802 - the name of the rpc
        self, request: reward_pb2.RewardServiceDescribeRequest, context: Context
    ) -> reward_pb2.RewardServiceDescribeResponse:
        self.shown += context.auth_context().get("x509_pem_cert", [])
        return await super().Describe(request, context)


@asynccontextmanager
async def rewards(servicer: FakeReward, **settings: object) -> AsyncIterator[str]:
    register = partial(add_RewardServiceServicer_to_server, servicer)
    async with serve("specrej.v1.RewardService", register, **settings) as address:
        yield address


def secured(pair: Pair, authority: Authority | None = None) -> dict[str, object]:
    """A server's settings."""
    client_ca = str(authority.path) if authority else ""
    return {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": client_ca}


def showing(pair: Pair, authority: Authority) -> Credentials:
    """A client's, for mutual TLS."""
    return Credentials(tls_ca=authority.path, tls_cert=pair.cert, tls_key=pair.key)


async def certificate_at(address: str) -> str:
    """What a new connection is shown, as PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(shown)
    finally:
        writer.transport.abort()


def leaf(pair: Pair) -> str:
    """The first certificate of the chain, as `certificate_at` writes it."""
    end = "-----END CERTIFICATE-----\n"
    text = pair.cert.read_text().partition(end)[0] + end
    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(text))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def foreign(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "foreign")


@contextmanager
def refused() -> Iterator[None]:
    """What a handshake that fails is to a client."""
    with pytest.raises(errors.Unavailable):
        yield


async def test_a_new_certificate_is_shown_and_open_calls_go_on(authority: Authority) -> None:
    """Guards against rotation that needs a restart, or that cuts off who is being served."""
    pair, orchestrator = authority.issue(), FakeOrchestrator()
    orchestrator.hangs = True
    register = partial(add_OrchestratorServiceServicer_to_server, orchestrator)
    async with (
        serve("specrej.v1.OrchestratorService", register, **secured(pair)) as address,
        Client(address, timeout_s=20, tls_ca=authority.path) as client,
        aclosing(client.stream("why?")) as events,
    ):
        first = await anext(events)
        old = await certificate_at(address)
        assert old == leaf(pair)
        authority.issue()
        new = await certificate_at(address)
        assert new == leaf(pair) != old
        await client.describe()  # on the connection of before
        assert not orchestrator.cancelled.is_set()
        assert first.n == 8  # type: ignore[union-attr]
        async with Client(address, timeout_s=20, tls_ca=authority.path) as late:
            await late.describe()


async def test_a_broken_certificate_leaves_the_old_one_in_force(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a half-copied file that locks everybody out."""
    pair = authority.issue()
    async with rewards(FakeReward(), **secured(pair)) as address:
        old = await certificate_at(address)
        place(pair.cert, "no certificate")
        with caplog.at_level(logging.WARNING, "specrej.watched"):
            assert [await certificate_at(address) for _ in range(3)] == [old] * 3
        assert len(caplog.records) == 1
        authority.issue()
        assert await certificate_at(address) == leaf(pair) != old


async def test_a_key_of_another_certificate_leaves_the_old_one_in_force(
    authority: Authority,
) -> None:
    """Guards the moment between two files that are replaced one after the other."""
    pair = authority.issue()
    async with rewards(FakeReward(), **secured(pair)) as address:
        old = await certificate_at(address)
        place(pair.key, authority.issue("other").key.read_bytes())
        assert await certificate_at(address) == old


async def test_mutual_tls_takes_its_own_clients_only(
    authority: Authority, foreign: Authority
) -> None:
    """Guards against a port that asks for certificates and takes any, or none."""
    server, own, stranger = authority.issue(), authority.issue("own"), foreign.issue("stranger")
    async with rewards(FakeReward(), **secured(server, authority)) as address:
        async with RewardClient(address, **showing(own, authority)) as client:
            assert (await client.describe())[0].name == "length"
        for credentials in (
            Credentials(tls_ca=authority.path),
            showing(stranger, authority),
            Credentials(),
        ):
            async with RewardClient(address, timeout_s=10, **credentials) as client:
                with refused():
                    await client.describe()


async def test_a_client_trusts_its_authority_only(authority: Authority, foreign: Authority) -> None:
    """Guards against talking to whoever answers."""
    async with rewards(FakeReward(), **secured(foreign.issue())) as address:
        for credentials in (Credentials(tls_ca=authority.path), Credentials(tls=True)):
            async with RewardClient(address, timeout_s=10, **credentials) as client:
                with refused():
                    await client.describe()


async def test_a_clients_new_certificate_is_shown(authority: Authority) -> None:
    """Guards against services that must be restarted when their own certificate is renewed."""
    server, own, servicer = authority.issue(), authority.issue("own"), CuriousReward()
    async with (
        rewards(servicer, **secured(server, authority)) as address,
        RewardClient(address, **showing(own, authority)) as client,
    ):
        await client.describe()
        before = leaf(own)
        authority.issue("own")
        await client.describe()
        await client.describe()
        after = leaf(own)
    assert [shown.decode() for shown in servicer.shown] == [before, after, after]


async def test_calls_under_way_outlive_a_clients_old_certificate(authority: Authority) -> None:
    """Guards against a renewal that cuts off the sessions of every running request."""
    server, own, orchestrator = authority.issue(), authority.issue("own"), PatientOrchestrator()
    register = partial(add_OrchestratorServiceServicer_to_server, orchestrator)
    async with (
        serve("specrej.v1.OrchestratorService", register, **secured(server, authority)) as address,
        Client(address, timeout_s=20, **showing(own, authority)) as client,
        aclosing(client.stream("why?")) as events,
    ):
        await anext(events)
        authority.issue("own")
        gc.collect()
        await client.describe()
        gc.collect()
        orchestrator.go_on.set()
        assert [type(event).__name__ async for event in events][-1] == "Finished"


async def test_threads_can_show_certificates_too(authority: Authority) -> None:
    """Guards the channels of a reward behind a reward, and of load tests."""
    server, own, servicer = authority.issue(), authority.issue("own"), CuriousReward()

    def ask(address: str) -> None:
        with open_blocking_channel(address, retries=False, **showing(own, authority)) as channel:
            stub = RewardServiceStub(channel)
            for _ in range(2):
                stub.Describe(reward_pb2.RewardServiceDescribeRequest(), timeout=10)
                authority.issue("own")

    async with rewards(servicer, **secured(server, authority)) as address:
        await asyncio.to_thread(ask, address)
    assert len(set(servicer.shown)) == 2


def test_files_that_cannot_be_used_are_told_in_one_line(
    authority: Authority, tmp_path: Path
) -> None:
    """Guards against OpenSSL's own words, and against a key's text in an error."""
    pair, other = authority.issue(), authority.issue("other")
    junk = tmp_path / "junk.pem"
    place(junk, "s3cret")
    for files, told in (
        (TLSFiles(pair.cert, tmp_path / "gone.pem"), "gone.pem"),
        (TLSFiles(pair.cert), "go together"),
        (TLSFiles(key=pair.key), "go together"),
        (TLSFiles(pair.cert, other.key), "is not the key of"),
        (TLSFiles(junk, pair.key), "must be a PEM certificate"),
        (TLSFiles(pair.cert, junk), "must be a PEM certificate"),
        (TLSFiles(ca=junk), "no PEM certificates"),
    ):
        with pytest.raises((OSError, ValueError), match=told) as raised:
            files.read()
        assert "s3cret" not in str(raised.value)
        assert "\n" not in str(raised.value)


async def test_a_file_that_is_gone_is_a_bad_request_of_the_clients(tmp_path: Path) -> None:
    """Guards against a traceback where the command line promises a line."""
    with pytest.raises(errors.InvalidRequest, match=r"gone\.pem"):
        RewardClient("127.0.0.1:1", tls_ca=tmp_path / "gone.pem")
