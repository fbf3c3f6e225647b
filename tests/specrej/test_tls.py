"""Real handshakes with real certificates: rotation, mutual TLS, refused certificates."""

from __future__ import annotations

import asyncio
import math
import re
import ssl
import time
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from deploy.local.stack import Stack
from specrej import Client, Retries
from specrej.client.channel import open_channel
from specrej.contracts import errors
from specrej.contracts.errors import InvalidRequest
from specrej.security import Credentials, TLSFiles, credentials_from
from specrej.server.serving import ServerGauges
from specrej.telemetry import metrics, names
from tests.certificates import Authority, Pair, place, token_line
from tests.serving import failure_of, listening
from tests.specrej.conftest import Command
from tests.specrej.fakes import FakeOrchestrator
from tests.toys import TOYS


def secured(pair: Pair, authority: Authority | None = None) -> dict[str, Any]:
    """A server's settings."""
    return {**pair.settings, "tls_client_ca": str(authority.path) if authority else ""}


def showing(pair: Pair, authority: Authority) -> Credentials:
    """A client's, for mutual TLS."""
    return Credentials(tls_ca=authority.path, tls_cert=pair.cert, tls_key=pair.key)


async def certificate_at(address: str) -> str:
    """The certificate that a new connection is shown, as PEM."""
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


async def test_a_new_certificate_is_shown_and_open_calls_go_on(authority: Authority) -> None:
    """Guards against rotation that needs a restart, or that cuts off running calls."""
    pair, orchestrator = authority.issue(), FakeOrchestrator()
    orchestrator.hangs = True
    async with (
        listening(orchestrator.service(), **secured(pair)) as address,
        Client(address, timeout_s=20, tls_ca=authority.path) as client,
        aclosing(client.stream("why?")) as events,
    ):
        first = await anext(events)
        old = await certificate_at(address)
        assert old == leaf(pair)
        authority.issue()
        new = await certificate_at(address)
        assert new == leaf(pair) != old
        await client.describe()  # on the connection with the old certificate
        assert not orchestrator.cancelled.is_set()
        assert first.n == 8  # type: ignore[union-attr]
        async with Client(address, timeout_s=20, tls_ca=authority.path) as late:
            await late.describe()


async def test_both_sides_accept_their_authority_only(
    authority: Authority, foreign: Authority
) -> None:
    """Guards against TLS that accepts any certificate, or none."""
    own, foreigner = authority.issue("own"), foreign.issue("foreigner")
    mutual, other = secured(authority.issue(), authority), secured(foreign.issue("other"))
    async with (
        listening(FakeOrchestrator().service(), **mutual) as address,
        listening(FakeOrchestrator().service(), **other) as foreign_address,
    ):
        async with Client(address, **showing(own, authority)) as client:
            assert await client.describe()
        for target, credentials in (
            (address, Credentials(tls_ca=authority.path)),
            (address, showing(foreigner, authority)),
            (address, Credentials()),
            (foreign_address, Credentials(tls_ca=authority.path)),
            (foreign_address, Credentials(tls=True)),
        ):
            async with Client(target, retries=Retries(1), **credentials) as client:
                with pytest.raises(errors.Unavailable):
                    await client.describe()


async def test_only_allowed_names_are_served(authority: Authority) -> None:
    """Guards against any program with a certificate of the authority; probes use their own."""
    right = authority.issue("right", "orchestrator")
    wrong = (authority.issue("none"), authority.issue("near", "orchestrator.evil", "orchestrato"))
    settings = secured(authority.issue(), authority) | {"allowed_clients": "other,orchestrator"}
    orchestrator = FakeOrchestrator()
    async with listening(orchestrator.service(), reflection=True, **settings) as address:
        for pair in wrong:
            credentials = showing(pair, authority)
            async with (
                Client(address, **credentials) as client,
                open_channel(address, **credentials) as channel,
            ):
                for call in (client.generate("why?"), client.describe(), anext(client.stream("?"))):
                    with pytest.raises(errors.PermissionDenied, match="allowed names"):
                        await call
                reflection: Any = ServerReflectionStub(channel)  # type: ignore[arg-type]
                failure = await failure_of(reflection.ServerReflectionInfo().read())
                assert failure.code() is grpc.StatusCode.PERMISSION_DENIED
                probes: Any = health_pb2_grpc.HealthStub(channel)
                reply = await probes.Check(health_pb2.HealthCheckRequest())
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert not orchestrator.requests
        async with Client(address, **showing(right, authority)) as client:
            assert (await client.generate("why?")).best.text


def test_errors_of_unusable_files_are_one_line(authority: Authority, tmp_path: Path) -> None:
    """Guards against OpenSSL's own texts, and against a key's text in an error."""
    pair, other = authority.issue(), authority.issue("other")
    junk, gone = tmp_path / "junk.pem", tmp_path / "gone.pem"
    place(junk, "s3cret")
    for files, message in (
        (TLSFiles(pair.cert, gone), "gone.pem"),
        (TLSFiles(pair.cert), "go together"),
        (TLSFiles(key=pair.key), "go together"),
        (TLSFiles(pair.cert, other.key), "is not the key of"),
        (TLSFiles(junk, pair.key), "must be a PEM certificate"),
        (TLSFiles(pair.cert, junk), "must be a PEM certificate"),
        (TLSFiles(ca=junk), "no PEM certificates"),
    ):
        with pytest.raises((OSError, ValueError), match=message) as raised:
            files.read()
        assert "s3cret" not in str(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(errors.InvalidRequest, match=r"gone\.pem"):
        Client("127.0.0.1:1", tls_ca=gone)


def test_a_chain_expires_with_its_first_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the alert before a certificate expires; without a certificate there is no end."""
    authority = Authority(tmp_path)
    end = datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC)
    short, long = authority.issue("short", expires=end), authority.issue("long")
    of_calls = TLSFiles(short.cert, short.key)
    assert of_calls.read().expires == end.timestamp()
    observed: dict[Any, Any] = {}
    monkeypatch.setattr(metrics, "observe", observed.__setitem__)
    ServerGauges(TLSFiles(long.cert, long.key).watch(), of_calls).observe()
    ((life_s, _),) = observed[names.CERTIFICATE_LIFE]()
    assert life_s == pytest.approx(end.timestamp() - time.time(), abs=60)
    long.cert.write_bytes(long.cert.read_bytes() + short.cert.read_bytes())
    assert TLSFiles(long.cert, long.key).read().expires == end.timestamp()
    assert TLSFiles(ca=authority.path).read().expires == math.inf


def test_a_switch_is_true_or_false() -> None:
    """Guards against prompts in plaintext after a value that was meant as true."""
    assert credentials_from({"SPECREJ_TLS": "True "})["tls"]
    assert not credentials_from({"SPECREJ_TLS": "0"})["tls"]
    assert not credentials_from({})["tls"]
    with pytest.raises(InvalidRequest, match="SPECREJ_TLS: must be one of true, 1"):
        credentials_from({"SPECREJ_TLS": "y"})


# All services as processes with TLS and tokens on every port, and every client of ours


def everywhere(directory: Path, authority: Authority) -> dict[str, str]:
    """TLS and tokens everywhere, mutual TLS where the orchestrator calls."""
    settings = dict(TOYS)
    for name in ("generator", "reward", "orchestrator"):
        pair, prefix = authority.issue(name), f"SPECREJ_{name.upper()}_"
        settings |= {f"{prefix}TLS_CERT": str(pair.cert), f"{prefix}TLS_KEY": str(pair.key)}
        settings[f"{prefix}TOKENS_FILE"] = str(directory / f"{name}-tokens")
        inner, mine = token_line("orchestrator", "inner"), token_line("acme", "mine")
        place(directory / f"{name}-tokens", mine if name == "orchestrator" else f"{inner}\n{mine}")
    pair, prefix = authority.issue("gateway"), "SPECREJ_GATEWAY_"
    settings |= {f"{prefix}TLS_CERT": str(pair.cert), f"{prefix}TLS_KEY": str(pair.key)}
    settings[f"{prefix}ORCHESTRATOR_TLS_CA"] = str(authority.path)
    place(directory / "inner", "inner")
    pair, prefix = authority.issue("inside"), "SPECREJ_ORCHESTRATOR_BACKEND_"
    settings |= {
        f"{prefix}TLS_CA": str(authority.path),
        f"{prefix}TLS_CERT": str(pair.cert),
        f"{prefix}TLS_KEY": str(pair.key),
        f"{prefix}TOKEN_FILE": str(directory / "inner"),
        "SPECREJ_GENERATOR_TLS_CLIENT_CA": str(authority.path),
    }
    return settings


@pytest.mark.long
async def test_everything_works_with_tls_and_tokens(
    authority: Authority, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the wiring: settings, readiness, backends, client, command line, gateway."""
    environment = everywhere(tmp_path, authority)
    pair = authority.issue("me")
    credentials = Credentials(tls_ca=authority.path, tls_cert=pair.cert, tls_key=pair.key)
    async with Stack(environment=environment, credentials=credentials, gateway=True) as stack:
        monkeypatch.setenv("SPECREJ_TLS_CA", str(authority.path))
        monkeypatch.setenv("SPECREJ_TOKEN", "mine")
        generate = ("generate", "why?", "--max-tokens", "16", "-n", "2")
        at_orchestrator = ("--address", stack.orchestrator_address)
        assert (await command(*generate, *at_orchestrator))[0]
        await command("score", "a", "--prompt", "why?", *at_orchestrator)
        url = f"https://127.0.0.1:{stack.ports.gateway}"
        trusted = ssl.create_default_context(cafile=authority.path)
        async with httpx2.AsyncClient(verify=trusted, trust_env=False, timeout=60) as http:
            for token, status in (("mine", 200), ("wrong", 401)):
                headers = {"authorization": f"Bearer {token}"}
                assert (await http.get(f"{url}/v1/models", headers=headers)).status_code == status
            exposed = (await http.get(stack.metrics_urls[-1])).text
        for metric in ("certificate_life_seconds", "event_loop_lag_seconds", "files_rejected"):
            assert re.search(rf"^specrej_{metric}\S* [0-9]", exposed, re.MULTILINE), metric
        for token, message in (("wrong", "unknown token"), ("", "a token is needed")):
            monkeypatch.setenv("SPECREJ_TOKEN", token)
            with pytest.raises(errors.Unauthenticated, match=message):
                await command(*generate, *at_orchestrator)
