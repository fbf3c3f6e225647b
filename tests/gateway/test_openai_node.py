"""The official client for Node, under its own test runner, against all services on toys."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from specrej import Client
from tests.serving import until, until_slots_are_free

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("node")
INSTALLED = ROOT / ".tools" / "node"  # make node-client


@pytest.mark.asyncio(loop_scope="session")
async def test_the_official_client_for_node(stack: Stack) -> None:
    node = shutil.which("node")
    if not node or not (INSTALLED / "node_modules").exists():
        pytest.skip("no client for Node: make node-client installs it")
    test = INSTALLED / "openai.test.js"
    shutil.copy(SOURCE / test.name, test)  # beside its packages, where Node looks for them
    process = await asyncio.create_subprocess_exec(
        *(node, "--test", str(test)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "GATEWAY_URL": stack.gateway_url},
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, output.decode()
    await until_slots_are_free(stack.generator_address)
    async with Client(stack.orchestrator_address) as client:

        async def is_cancelled() -> bool:
            latest, *_ = await client.records()
            return latest.outcome == "CANCELLED"  # of the last test, which aborts

        await until(is_cancelled)


def test_packages_for_node_are_pinned() -> None:
    """Guards against another version in CI than in the lock."""
    lock = json.loads((SOURCE / "package-lock.json").read_text())
    for name, version in json.loads((SOURCE / "package.json").read_text())["dependencies"].items():
        package = lock["packages"][f"node_modules/{name}"]
        assert package["version"] == version
        assert package["integrity"].startswith("sha512-")
