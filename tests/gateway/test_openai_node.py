"""The official client for Node, under its own test runner."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from tests.gateway.gateways import gateway_at
from tests.gateway.scripted import ALL, script
from tests.programs import ROOT, run
from tests.serving import until_slots_are_free
from tests.specrej.fakes import FakeOrchestrator

SOURCE = Path(__file__).with_name("node")
INSTALLED = ROOT / ".tools" / "node"  # make node-client


async def run_tests(name: str, url: str) -> None:
    node = shutil.which("node")
    if not node or not (INSTALLED / "node_modules").exists():
        pytest.skip("no client for Node: make node-client installs it")
    shutil.copy(SOURCE / name, INSTALLED / name)  # beside its packages, where Node looks for them
    await run(node, "--test", INSTALLED / name, GATEWAY_URL=url)


@pytest.mark.asyncio(loop_scope="session")
async def test_all_services_on_toys(stack: Stack) -> None:
    await run_tests("openai.test.js", stack.gateway_url)
    await until_slots_are_free(stack.generator_address)  # of the last test, which aborts


async def test_calls_and_items(address: str, orchestrator: FakeOrchestrator) -> None:
    script(orchestrator, ALL)
    async with gateway_at(address) as server:
        await run_tests("tools.test.js", f"http://127.0.0.1:{server.port}")
