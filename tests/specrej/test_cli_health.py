"""`specrej health` as a probe runs it: a process of its own against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specrej.serving import Server, Service
from specrej.settings import ServiceSettings
from tests.certificates import Authority
from tests.specrej.test_cli import run

NAME = "specrej.v1.SomeService"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """Not ready yet, and by mutual TLS."""
    authority = Authority(tmp_path)
    pair = authority.issue()
    settings = ServiceSettings(
        tls_cert=str(pair.cert), tls_key=str(pair.key), tls_client_ca=str(authority.path)
    )
    server = Server(settings, [Service(NAME, lambda _: None)])
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    files = {"CA": "ca.pem", "CERT": "server.pem", "KEY": "server.key"}
    return {f"SPECREJ_TLS_{name}": str(tmp_path / path) for name, path in files.items()}


async def test_health_follows_the_service(server: Server, variables: dict[str, str]) -> None:
    """Guards against a probe that restarts what is well, or sends calls to what is not."""
    asked = ("health", f"localhost:{server.port}", "--service", NAME)
    loading = await run(*asked, **variables)
    assert (loading.code, loading.err) == (1, "specrej: NOT_SERVING\n")
    await server.set_serving(True)
    ready = await run(*asked, **variables)
    assert (ready.code, ready.out, ready.err) == (0, "", "")


async def test_an_unknown_name_is_not_health(server: Server, variables: dict[str, str]) -> None:
    await server.set_serving(True)
    outcome = await run("health", f"localhost:{server.port}", "--service", "nobody", **variables)
    assert outcome.code == 1
    assert "NOT_FOUND" in outcome.err


async def test_without_a_certificate_there_is_no_health(
    server: Server, variables: dict[str, str]
) -> None:
    """One line, no stack: it ends up in the events of a pod."""
    await server.set_serving(True)
    only_ca = {"SPECREJ_TLS_CA": variables["SPECREJ_TLS_CA"]}
    outcome = await run("health", f"localhost:{server.port}", "--timeout", "2", **only_ca)
    assert outcome.code == 1
    assert len(outcome.err.splitlines()) == 1


async def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    outcome = await run("health", "localhost:1", "--tls-ca", str(tmp_path / "none.pem"))
    assert outcome.code == 1
    assert "none.pem" in outcome.err
