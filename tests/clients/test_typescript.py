"""clients/typescript under Node's test runner, on all services with toys."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy import release
from deploy.local.stack import Stack
from tests.certificates import Authority, token_line
from tests.programs import ROOT, run
from tests.serving import listening, until_slots_are_free
from tests.specrej.fakes import FakeOrchestrator

CLIENT = ROOT / "clients/typescript"
USE = 'import { Client } from "specrej"; new Client({ address: "127.0.0.1:1" }).close();'

pytestmark = pytest.mark.asyncio(loop_scope="session")
installed = pytest.mark.skipif(
    not (shutil.which("node") and (CLIENT / "node_modules").exists()),
    reason="no packages for Node: make node-client installs them",
)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def built() -> None:
    """The client, generated and compiled, with its tests and examples."""
    shutil.rmtree(CLIENT / "dist", ignore_errors=True)
    await run("npm", "run", "--silent", "build", folder=CLIENT)


@installed
@pytest.mark.usefixtures("built")
async def test_the_client(toys: Stack) -> None:
    """Guards against calls that are left early and hold the process until their deadline, too."""
    address = toys.orchestrator_address
    programs = (f"dist/test/{name}.test.js" for name in ("client", "lost"))
    await run("node", "--test", *programs, folder=CLIENT, bound_s=200, SPECREJ_ADDRESS=address)
    # Less time than a request of the tests takes that no client cancels.
    await until_slots_are_free(toys.generator_address, bound_s=10)


@pytest.mark.long
@installed
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", sorted(path.stem for path in (CLIENT / "examples").iterdir()))
async def test_an_example(toys: Stack, name: str) -> None:
    address = toys.orchestrator_address
    program = f"dist/examples/{name}.js"
    assert "score" in await run("node", program, folder=CLIENT, SPECREJ_ADDRESS=address)


@pytest.mark.long
@installed
@pytest.mark.usefixtures("built")
async def test_tls_and_tokens(tmp_path: Path) -> None:
    authority, tokens = Authority(tmp_path), tmp_path / "tokens"
    server, client = authority.issue(), authority.issue("client")
    tokens.write_text(token_line("acme", "mine"))
    settings: dict[str, Any] = {
        **server.settings,
        "tls_client_ca": str(authority.path),
        "tokens_file": str(tokens),
    }
    async with listening(FakeOrchestrator().service(), **settings) as address:
        await run(
            *("node", "--test", "dist/test/secured.test.js"),
            folder=CLIENT,
            SPECREJ_ADDRESS=address,
            SPECREJ_TOKEN="mine",
            SPECREJ_TLS_CA=str(authority.path),
            SPECREJ_TLS_CERT=str(client.cert),
            SPECREJ_TLS_KEY=str(client.key),
        )


@pytest.mark.long
@installed
async def test_the_package_is_complete(tmp_path: Path) -> None:
    """Guards against files that npm leaves out."""
    shutil.unpack_archive(release.pack_node(tmp_path), tmp_path, filter="data")
    packed = {path.name for path in (tmp_path / "package").iterdir()}
    assert packed == {"package.json", "README.md", "LICENSE", "dist"}
    modules = tmp_path / "node_modules"
    modules.mkdir()
    (tmp_path / "package").rename(modules / "specrej")
    for scope in ("@bufbuild", "@connectrpc"):
        (modules / scope).symlink_to(CLIENT / "node_modules" / scope)
    await run("node", "--input-type=module", "--eval", USE, folder=tmp_path)


async def test_the_version_is_that_of_the_python_client() -> None:
    package = json.loads((CLIENT / "package.json").read_text())
    lock = json.loads((CLIENT / "package-lock.json").read_text())["packages"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert package["version"] == lock[""]["version"] == project["version"]
