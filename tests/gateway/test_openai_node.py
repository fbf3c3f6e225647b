"""The official client for Node, under its own test runner, against all services on toys."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from specrej import Client
from tests.programs import ROOT, run
from tests.serving import until, until_slots_are_free

SOURCE = Path(__file__).with_name("node")
INSTALLED = ROOT / ".tools" / "node"  # make node-client


@pytest.mark.asyncio(loop_scope="session")
async def test_the_official_client_for_node(stack: Stack) -> None:
    node = shutil.which("node")
    if not node or not (INSTALLED / "node_modules").exists():
        pytest.skip("no client for Node: make node-client installs it")
    test = INSTALLED / "openai.test.js"
    shutil.copy(SOURCE / test.name, test)  # beside its packages, where Node looks for them
    await run(node, "--test", test, GATEWAY_URL=stack.gateway_url)
    await until_slots_are_free(stack.generator_address)
    async with Client(stack.orchestrator_address) as client:

        async def is_cancelled() -> bool:
            latest, *_ = await client.records()
            return latest.outcome == "CANCELLED"  # of the last test, which aborts

        await until(is_cancelled)
