"""Tokens, tenants and roles: in memory, in files that `specrej token` writes, through a server."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2_grpc

from specrej import Client, security
from specrej.client.channel import open_channel
from specrej.contracts import errors
from specrej.security import Access, check_credentials, is_local, read_tokens
from specrej.server import interceptor
from specrej.v1 import orchestrator_pb2 as pb
from specrej.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.certificates import place, token_line
from tests.serving import failure_of, health_of, listening, reason_of, until
from tests.specrej.conftest import Command
from tests.specrej.fakes import FakeOrchestrator

GENERATE = "/specrej.v1.OrchestratorService/Generate"
DESCRIBE = "/specrej.v1.OrchestratorService/Describe"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def tokens_file(path: Path, **roles: list[str] | None) -> Path:
    """Tenant NAME has the token "NAME-token" and these roles."""
    lines = (
        token_line(name, f"{name}-token", **({"roles": names} if names else {}))
        for name, names in roles.items()
    )
    place(path, "\n".join(["# tokens", "", *lines]))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tokens_file(
        tmp_path / "tokens", acme=None, edge=["gateway"], ops=["admin"], both=["admin", "generate"]
    )


def test_roles(path: Path) -> None:
    """Guards the table of roles and methods."""
    access = Access(path)
    for tenant in ("acme", "edge", "both"):
        assert access.admit(GENERATE, bearer(f"{tenant}-token")).tenant == tenant
    for tenant in ("acme", "ops"):
        for method in (DESCRIBE, REFLECTION):
            assert access.admit(method, bearer(f"{tenant}-token")).tenant == tenant
    sessions = (
        "/specrej.backend.v1.GeneratorService/Session",
        "/specrej.backend.v1.RewardService/Score",
    )
    for method in (GENERATE, *sessions):
        with pytest.raises(errors.PermissionDenied):
            access.admit(method, bearer("ops-token"))


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        bearer(""),
        bearer("acme"),
        bearer("acme-token2"),
        bearer("ACME-TOKEN"),
        bearer("\udcff"),
        [("authorization", "acme-token")],
        [("authorization", "Basic acme-token")],
        [*bearer("acme-token"), *bearer("edge-token")],
        bearer(hashlib.sha256(b"acme-token").hexdigest()),
    ],
)
@pytest.mark.parametrize("method", [GENERATE, DESCRIBE, REFLECTION, "/no.Such/Method", ""])
def test_other_metadata_is_refused(
    path: Path, metadata: list[tuple[str, str]], method: str
) -> None:
    """Guards default deny, and against the file's own digests being as good as a token."""
    with pytest.raises(errors.Unauthenticated):
        Access(path).admit(method, metadata)


def test_only_a_gateway_names_tenants(path: Path) -> None:
    """Guards against a caller that reads another tenant's cache by its name."""
    access, header = Access(path), ("specrej-tenant", "victim")
    assert access.admit(GENERATE, [*bearer("acme-token"), header]).tenant == "acme"
    assert access.admit(GENERATE, [*bearer("both-token"), header]).tenant == "both"
    assert access.admit(GENERATE, [*bearer("edge-token"), header]).tenant == "victim"
    assert access.admit(GENERATE, bearer("edge-token")).tenant == "edge"
    assert Access().admit(GENERATE, [header]).tenant == "victim"
    assert Access().admit(GENERATE, []).tenant == ""


def test_a_tenant_has_one_weight(tmp_path: Path) -> None:
    """Guards new tokens of a tenant, and tenants of a gateway, against the default weight."""
    path = tokens_file(tmp_path / "tokens", acme=None, other=None, edge=["gateway"])
    more = line(tenant="acme", weight=2.5)
    place(path, f"{path.read_text()}\n{more}")
    access, header = Access(path), ("specrej-tenant", "acme")
    assert access.admit(GENERATE, bearer("acme-token")).weight == 2.5
    assert access.admit(GENERATE, [*bearer("edge-token"), header]).weight == 2.5
    assert access.admit(GENERATE, bearer("edge-token")).weight == 1
    assert access.admit(GENERATE, bearer("other-token")).weight == 1
    place(path, path.read_text().replace("2.5", "4"))
    assert access.admit(GENERATE, bearer("acme-token")).weight == 4


def test_two_tenants_are_refused(path: Path) -> None:
    """Guards against a proxy in front that checks the first header and forwards both."""
    twice = [("specrej-tenant", "own"), ("specrej-tenant", "victim")]
    with pytest.raises(errors.InvalidRequest, match="specrej-tenant: must be given once"):
        Access().admit(GENERATE, twice)
    for tenant in ("edge", "acme"):
        with pytest.raises(errors.InvalidRequest, match="specrej-tenant: must be given once"):
            Access(path).admit(GENERATE, [*bearer(f"{tenant}-token"), *twice])
    with pytest.raises(errors.Unauthenticated):
        Access(path).admit(GENERATE, twice)


def test_a_token_expires(tmp_path: Path) -> None:
    """Guards against a time that is ignored, or read in another zone."""
    now = datetime.now(UTC)
    for zone, suffix in ((UTC, "Z"), (timezone(timedelta(hours=-9)), "-09:00")):
        for minutes, is_valid in ((1, True), (-1, False)):
            end = (now + timedelta(minutes=minutes)).astimezone(zone)
            expires = end.strftime("%Y-%m-%dT%H:%M:%S") + suffix
            place(tmp_path / "tokens", token_line("a", "token", expires=expires))
            access = Access(tmp_path / "tokens")
            if is_valid:
                assert access.admit(GENERATE, bearer("token")).tenant == "a"
            else:
                with pytest.raises(errors.Unauthenticated, match="expired"):
                    access.admit(GENERATE, bearer("token"))


BAD_WEIGHTS: list[object] = [0, -1, 0.001, 101, True, "s3cret", [], float("nan"), float("inf")]
BAD_ROLES: list[object] = [[], "admin", ["s3cret"], [{}]]
BAD_TIMES = (3, "", "s3cret", "2030-01-01", "2030-01-01T00:00:00", "2030-13-01T00:00:00Z")


def line(**changes: object) -> str:
    """A line of a tokens file; a change to None removes the field."""
    fields = {"tenant": "a", "sha256": "ab" * 32, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "must be a JSON object") for text in ("s3cret", '["s3cret"]', line(s3cret=1))),
        *((line(tenant=tenant), "tenant must be a name") for tenant in (None, "", 3)),
        *((line(sha256=digest), "line 1: sha256 must be 64") for digest in (None, "s3cret")),
        *((line(roles=roles), "roles must be") for roles in BAD_ROLES),
        *((line(weight=weight), "weight must be from 0.01 to 100") for weight in BAD_WEIGHTS),
        *((line(expires=time), "line 1: expires must be a time") for time in BAD_TIMES),
        (f"{line()}\n{line()}", "line 2: the same token twice"),
        (f"{line(weight=2)}\n{line(sha256='cd' * 32, weight=3)}", "line 2: two weights"),
    ],
)
def test_errors_of_bad_lines_do_not_quote_them(tmp_path: Path, text: str, message: str) -> None:
    """Guards against entries that are skipped without an error, and secrets in error messages."""
    place(tmp_path / "tokens", text)
    with pytest.raises(ValueError, match=message) as raised:
        read_tokens(tmp_path / "tokens")
    assert "s3cret" not in str(raised.value)


LOCAL = ("127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1", "unix:///run/x")
OTHER = ("0.0.0.0:1", "10.0.0.1:1", "localhost.example.com:1", "dns:///a.com:1", "example.com:1")


@pytest.mark.parametrize("address", [*LOCAL, *OTHER])
def test_tokens_are_sent_without_tls_within_this_machine_only(address: str) -> None:
    """Guards against a token that is readable on the network."""
    assert is_local(address) == (address in LOCAL)
    with nullcontext() if address in LOCAL else pytest.raises(ValueError, match="in plaintext"):
        check_credentials(address, {"token": "t"})
    check_credentials(address, {"token": "t", "tls": True})
    check_credentials(address, {"token": "t", "allow_plaintext_token": True})


@pytest.fixture
async def address(orchestrator: FakeOrchestrator, path: Path) -> AsyncIterator[str]:
    async with listening(orchestrator.service(), tokens_file=str(path), reflection=True) as bound:
        yield bound


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(address) as channel:
        yield channel


def calls(channel: grpc.aio.Channel) -> dict[str, Callable[[Any], Awaitable[Any]]]:
    """A call of every kind: unary, streaming, bidirectional, and of a method that is not there."""
    stub: Any = OrchestratorServiceStub(channel)

    async def stream(metadata: Any) -> list[Any]:
        request = pb.GenerateStreamRequest()
        return [event async for event in stub.GenerateStream(request, metadata=metadata)]

    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    unknown: Any = channel.unary_unary("/specrej.v1.OrchestratorService/Nothing")
    return {
        "unary": lambda metadata: stub.Generate(pb.GenerateRequest(), metadata=metadata),
        "describe": lambda metadata: stub.Describe(
            pb.OrchestratorServiceDescribeRequest(), metadata=metadata
        ),
        "stream": stream,
        # Nothing is written: grpc has a code of its own for a stream that is refused in a write.
        "reflection": lambda metadata: reflection.ServerReflectionInfo(metadata=metadata).read(),
        "unknown": lambda metadata: unknown(b"", metadata=metadata),
    }


async def test_every_kind_of_call_needs_a_token(
    channel: grpc.aio.Channel, orchestrator: FakeOrchestrator, address: str
) -> None:
    """Guards against a kind of call, or a method, without the check; probes have no token."""
    for call in calls(channel).values():
        for metadata in ([], bearer("wrong")):
            failure = await failure_of(call(metadata))
            assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
            assert reason_of(failure) == "UNAUTHENTICATED"
    assert not orchestrator.requests
    assert await health_of(address) == "SERVING"


async def test_token_files_of_both_sides_are_read_again(
    address: str, path: Path, tmp_path: Path
) -> None:
    """Guards against revocation or renewal that waits for a restart, and against a typing mistake
    that refuses all callers; an empty file revokes all."""
    place(tmp_path / "token", "acme-token\n")
    async with Client(address, token_file=tmp_path / "token") as client:
        await client.describe()
        tokens_file(path, new=None)
        with pytest.raises(errors.Unauthenticated):
            await client.describe()
        place(tmp_path / "token", "new-token")
        await client.describe()
        place(path, '{"tenant": "new", "sha256": "pasted-token"}')
        await client.describe()
        place(path, "")
        with pytest.raises(errors.Unauthenticated):
            await client.describe()


@pytest.mark.parametrize("is_expiring", [False, True], ids=["removed", "expiring"])
async def test_a_token_that_ends_ends_its_running_calls(
    orchestrator: FakeOrchestrator, path: Path, monkeypatch: pytest.MonkeyPatch, is_expiring: bool
) -> None:
    """Guards against a revoked token that streams on, and an end of other tenants' calls."""
    monkeypatch.setattr(interceptor, "_RECHECK_S", 0.02)
    orchestrator.hangs = True
    kept = tokens_file(path.with_name("kept"), edge=["gateway"]).read_text()
    expiring = token_line("acme", "acme-token", expires="2090-01-01T00:00:00Z")
    if is_expiring:
        place(path, f"{kept}\n{expiring}")
    bound = listening(orchestrator.service(), tokens_file=str(path), reflection=True)
    async with bound as address, open_channel(address) as channel:
        kinds = calls(channel)
        ending = [
            asyncio.ensure_future(kinds[kind](bearer("acme-token")))
            for kind in ("unary", "stream", "reflection")
        ]
        staying = asyncio.ensure_future(kinds["stream"](bearer("edge-token")))
        await until(lambda: len(orchestrator.requests) == 3)
        await asyncio.sleep(0.1)  # several checks pass
        if is_expiring:  # while the file, which was read, stays as it is
            monkeypatch.setattr(security, "time", SimpleNamespace(time=lambda: 4e9))
        else:
            place(path, kept)
        for call in ending:
            failure = await asyncio.wait_for(failure_of(call), 10)
            assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
            reason = "the token has expired" if is_expiring else "unknown token"
            assert failure.details() == reason
        orchestrator.released.set()
        assert await staying


@pytest.mark.parametrize("token", ["two words", "new\nline", "é"])
def test_malformed_tokens_are_not_sent(token: str) -> None:
    """Guards against metadata that grpc itself refuses with an opaque error."""
    with pytest.raises(errors.InvalidRequest, match="bearer token") as raised:
        Client("127.0.0.1:1", token=token)
    assert token not in str(raised.value)


async def test_a_new_token_and_its_line_are_printed_apart(tmp_path: Path, command: Command) -> None:
    """Guards scripts: the file never holds a token, nor a message, and services accept it."""
    path, tokens = tmp_path / "tokens", set[str]()
    for tenant, roles in (("acme", []), ("edge", ["gateway", "generate"]), ("ops", ["admin"])):
        flags = [flag for role in roles for flag in ("--role", role)]
        line, token = await command("token", tenant, *flags)
        with path.open("a") as file:
            file.write(line)
        metadata = [("authorization", f"Bearer {token.strip()}")]
        method = "/specrej.v1.OrchestratorService/Describe"
        assert Access(path).admit(method, metadata).tenant == tenant
        tokens.add(token.strip())
    assert len(tokens) == 3 and all(len(token) >= 43 for token in tokens)
    assert not any(token in path.read_text() for token in tokens)
    line, _ = await command("token", "acme", "--expires", "2030-12-31T23:59:59Z")
    assert json.loads(line)["expires"] == "2030-12-31T23:59:59Z"
