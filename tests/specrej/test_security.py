"""Tokens, tenants and roles: in memory, in files, and through a real server."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specrej import Client, RewardClient, errors
from specrej.channel import open_channel
from specrej.credentials import check_credentials, is_local
from specrej.security import Access, Role, append_line, current_caller, new_token, read_tokens
from specrej.serving import Context
from specrej.v1 import orchestrator_pb2 as pb
from specrej.v1.orchestrator_pb2_grpc import (
    OrchestratorServiceStub,
    add_OrchestratorServiceServicer_to_server,
)
from tests.certificates import place
from tests.serving import failure_of, reason_of
from tests.specrej.fakes import FakeOrchestrator, serve

GENERATE = "/specrej.v1.OrchestratorService/Generate"
DESCRIBE = "/specrej.v1.OrchestratorService/Describe"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/Check"


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def tokens_file(path: Path, **roles: list[str] | None) -> Path:
    """Tenant NAME has the token "NAME-token" and these roles."""
    entries = [
        {"tenant": name, "sha256": hashlib.sha256(f"{name}-token".encode()).hexdigest()}
        | ({"roles": given} if given else {})
        for name, given in roles.items()
    ]
    place(path, "\n".join(["# who may call", "", *map(json.dumps, entries)]))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tokens_file(
        tmp_path / "tokens", acme=None, edge=["gateway"], ops=["admin"], both=["admin", "generate"]
    )


@pytest.mark.parametrize(
    ("tenant", "method", "is_allowed"),
    [
        ("acme", GENERATE, True),
        ("acme", DESCRIBE, True),
        ("acme", REFLECTION, True),
        ("edge", GENERATE, True),
        ("both", GENERATE, True),
        ("ops", GENERATE, False),
        ("ops", "/specrej.v1.GeneratorService/Session", False),
        ("ops", "/specrej.v1.RewardService/Score", False),
        ("ops", DESCRIBE, True),
        ("ops", REFLECTION, True),
    ],
)
def test_roles(path: Path, tenant: str, method: str, is_allowed: bool) -> None:
    """Guards the table of who may do what."""
    access = Access(path)
    if is_allowed:
        assert access.admit(method, bearer(f"{tenant}-token")).tenant == tenant
    else:
        with pytest.raises(errors.PermissionDenied):
            access.admit(method, bearer(f"{tenant}-token"))


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
def test_everything_else_is_refused(
    path: Path, metadata: list[tuple[str, str]], method: str
) -> None:
    """Guards default deny, and against the file's own digests being as good as a token."""
    with pytest.raises(errors.Unauthenticated):
        Access(path).admit(method, metadata)


def test_only_a_gateway_names_tenants(path: Path) -> None:
    """Guards against a caller that reads another's cache by saying its name."""
    access, header = Access(path), ("specrej-tenant", "victim")
    assert access.admit(GENERATE, [*bearer("acme-token"), header]).tenant == "acme"
    assert access.admit(GENERATE, [*bearer("both-token"), header]).tenant == "both"
    assert access.admit(GENERATE, [*bearer("edge-token"), header]).tenant == "victim"
    assert access.admit(GENERATE, bearer("edge-token")).tenant == "edge"
    assert Access().admit(GENERATE, [header]).tenant == "victim"
    assert Access().admit(GENERATE, []).tenant == ""


def test_every_entry_is_compared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against answers that come sooner for the first tenant: time would tell who it is."""
    seen: list[bool] = []
    genuine = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        seen.append(genuine(one, other))
        return seen[-1]

    monkeypatch.setattr(hmac, "compare_digest", counted)
    Access(path).admit(GENERATE, bearer("acme-token"))
    assert seen == [True, False, False, False]


def test_a_revoked_token_is_refused_from_the_next_call_on(path: Path) -> None:
    """Guards against revocation that waits for a restart; an empty file revokes all."""
    access = Access(path)
    assert access.admit(GENERATE, bearer("acme-token")).tenant == "acme"
    tokens_file(path, new=None)
    assert access.admit(GENERATE, bearer("new-token")).tenant == "new"
    with pytest.raises(errors.Unauthenticated):
        access.admit(GENERATE, bearer("acme-token"))
    place(path, "")
    with pytest.raises(errors.Unauthenticated):
        access.admit(GENERATE, bearer("new-token"))


def test_a_broken_file_keeps_the_old_entries_and_quotes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a typing mistake that locks everybody out, or puts a token into a log."""
    access = Access(path)
    place(path, '{"tenant": "acme", "sha256": "pasted-token"}')
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert access.admit(GENERATE, bearer("acme-token")).tenant == "acme"
    assert len(caplog.records) == 1
    assert "line 1: sha256 must be 64 hex digits" in caplog.text
    assert "pasted-token" not in caplog.text


DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("s3cret", "must be a JSON object"),
        ('["s3cret"]', "must be a JSON object"),
        (f'{{"tenant": "a", "sha256": "{DIGEST}", "s3cret": 1}}', "must be a JSON object"),
        (f'{{"sha256": "{DIGEST}"}}', "tenant must be a name"),
        (f'{{"tenant": "", "sha256": "{DIGEST}"}}', "tenant must be a name"),
        (f'{{"tenant": 3, "sha256": "{DIGEST}"}}', "tenant must be a name"),
        ('{"tenant": "a"}', "sha256 must be 64"),
        ('{"tenant": "a", "sha256": "s3cret"}', "sha256 must be 64"),
        (f'{{"tenant": "a", "sha256": "{DIGEST}", "roles": []}}', "roles must be"),
        (f'{{"tenant": "a", "sha256": "{DIGEST}", "roles": "admin"}}', "roles must be"),
        (f'{{"tenant": "a", "sha256": "{DIGEST}", "roles": ["s3cret"]}}', "roles must be"),
        (f'{{"tenant": "a", "sha256": "{DIGEST}", "roles": [{{}}]}}', "roles must be"),
        (f'{{"tenant": "a", "sha256": "{DIGEST}"}}\n' * 2, "twice"),
    ],
)
def test_bad_lines_are_told_without_quoting_them(tmp_path: Path, line: str, told: str) -> None:
    """Guards against entries that are skipped in silence, and secrets in error messages."""
    place(tmp_path / "tokens", line)
    with pytest.raises(ValueError, match=told) as raised:
        read_tokens(tmp_path / "tokens")
    assert "s3cret" not in str(raised.value)


def test_made_tokens_are_let_in(tmp_path: Path) -> None:
    """Guards against a command whose line its own services cannot read."""
    path = tmp_path / "tokens"
    place(path, "# no newline at the end")
    made = {}
    for tenant, roles in (("a", []), ("b", [Role.ADMIN]), ("c", [Role.GATEWAY, Role.GENERATE])):
        made[tenant], line = new_token(tenant, roles)
        append_line(path, line)
        assert made[tenant] not in line
    access = Access(path)
    for tenant, token in made.items():
        assert access.admit(DESCRIBE, bearer(token)).tenant == tenant
    assert len(set(made.values())) == 3
    assert all(len(token) >= 43 for token in made.values())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:///run/x", True),
        ("0.0.0.0:1", False),
        ("10.0.0.1:1", False),
        ("localhost.example.com:1", False),
        ("dns:///example.com:1", False),
        ("example.com:1", False),
    ],
)
def test_tokens_stay_on_this_machine_without_tls(address: str, expected: bool) -> None:
    """Guards against a token that anybody on the way can read."""
    assert is_local(address) is expected
    if expected:
        check_credentials(address, {"token": "t"})
        return
    with pytest.raises(ValueError, match="in plaintext"):
        check_credentials(address, {"token": "t"})
    check_credentials(address, {"token": "t", "tls": True})
    check_credentials(address, {"token": "t", "allow_plaintext_token": True})


class CuriousOrchestrator(FakeOrchestrator):
    """Remembers on whose behalf it was asked; breaks if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.tenants: list[str] = []

    async def _take(self, request: pb.GenerateRequest, context: Context) -> None:
        self.tenants.append(current_caller().tenant)
        await super()._take(request, context)


@pytest.fixture
def servicer() -> CuriousOrchestrator:
    return CuriousOrchestrator()


@pytest.fixture
async def address(servicer: CuriousOrchestrator, path: Path) -> AsyncIterator[str]:
    register = partial(add_OrchestratorServiceServicer_to_server, servicer)
    settings = {"tokens_file": str(path), "reflection": True}
    async with serve("specrej.v1.OrchestratorService", register, **settings) as bound:
        yield bound


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(address, retries=False) as channel:
        yield channel


Calls = dict[str, Callable[[Any], Awaitable[Any]]]


def calls(channel: grpc.aio.Channel) -> Calls:
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


async def reflected(channel: grpc.aio.Channel, metadata: Any) -> list[Any]:
    """What reflection says of the services."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = stub.ServerReflectionInfo(iter([question]), metadata=metadata)
    return [answer async for answer in answers]


@pytest.mark.parametrize("kind", ["unary", "describe", "stream", "reflection", "unknown"])
async def test_a_port_with_tokens_answers_nobody_without(
    channel: grpc.aio.Channel, servicer: CuriousOrchestrator, kind: str
) -> None:
    """Guards against a kind of call, or a method, that slips past the check."""
    call = calls(channel)[kind]
    for metadata in ([], bearer("wrong")):
        failure = await failure_of(call(metadata))
        assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
        assert reason_of(failure) == "UNAUTHENTICATED"
    assert not servicer.requests


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_a_role_that_is_missing(channel: grpc.aio.Channel, kind: str) -> None:
    """Guards against every token being good for everything."""
    failure = await failure_of(calls(channel)[kind](bearer("ops-token")))
    assert failure.code() is grpc.StatusCode.PERMISSION_DENIED
    assert reason_of(failure) == "PERMISSION_DENIED"


async def test_a_token_opens_everything_it_is_for(channel: grpc.aio.Channel) -> None:
    """Guards against a check that breaks what it lets through."""
    kinds = calls(channel)
    for kind in ("unary", "describe", "stream"):
        await kinds[kind](bearer("acme-token"))
    (answer,) = await reflected(channel, bearer("acme-token"))
    assert "OrchestratorService" in str(answer)
    failure = await failure_of(kinds["unknown"](bearer("acme-token")))
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_is_open(channel: grpc.aio.Channel) -> None:
    """Guards the probes, which have no token."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_handler_knows_the_tenant_of_each_call(
    address: str, servicer: CuriousOrchestrator
) -> None:
    """Guards against a tenant that is lost on the way, or left over from the call before."""
    for tenant in ("acme", "both", "acme"):
        async with Client(address, token=f"{tenant}-token") as client:
            await client.generate("why?")
            async for _ in client.stream("why?"):
                pass
    assert servicer.tenants == ["acme", "acme", "both", "both", "acme", "acme"]


async def test_a_clients_token_file_is_read_again(address: str, path: Path, tmp_path: Path) -> None:
    """Guards against services that must be restarted when their token is renewed."""
    place(tmp_path / "token", "acme-token\n")
    async with Client(address, token_file=tmp_path / "token") as client:
        await client.describe()
        tokens_file(path, new=None)
        with pytest.raises(errors.Unauthenticated):
            await client.describe()
        place(tmp_path / "token", "new-token")
        await client.describe()


async def test_a_bug_in_the_check_lets_nobody_in(
    channel: grpc.aio.Channel, servicer: CuriousOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against failing open, and against the bug's text leaving the process."""

    def broken(*_: object) -> None:
        raise RuntimeError("s3cret")

    monkeypatch.setattr(Access, "admit", broken)
    failure = await failure_of(calls(channel)["unary"](bearer("acme-token")))
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert reason_of(failure) == "INTERNAL"
    assert "s3cret" not in repr(failure)
    assert "RuntimeError" not in repr(failure)
    assert not servicer.requests


@pytest.mark.parametrize("token", ["two words", "new\nline", "é"])
def test_what_is_no_token_is_told_and_not_sent(token: str) -> None:
    """Guards against metadata that grpc itself refuses with an error nobody understands."""
    with pytest.raises(errors.InvalidRequest, match="bearer token") as raised:
        RewardClient("127.0.0.1:1", token=token)
    assert token not in str(raised.value)


async def test_a_client_refuses_to_send_its_token_in_plaintext() -> None:
    """Guards the same through the public client."""
    with pytest.raises(errors.InvalidRequest, match="in plaintext"):
        Client("example.com:50050", token="t")
