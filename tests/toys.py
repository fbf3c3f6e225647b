"""One stack of toys for all tests of commands that need an address only."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator

import pytest_asyncio

from deploy.local.stack import Stack
from tests.programs import ROOT

_COMPOSITES = re.search(
    r"^SPECREJ_ORCHESTRATOR_COMPOSITES='([^']+)'", (ROOT / "docs/rewards.md").read_text(), re.M
)
assert _COMPOSITES
_REWARDS = [
    # With the names of the embedded rewards, which documents and examples use.
    *({"name": name, "kind": "toy"} for name in ("toy", "relevance", "harmless")),
    *json.loads((ROOT / "examples/coding/rewards.json").read_text()),
]
_SETTINGS = {
    # A request for 4,000 tokens takes longer than any test waits.
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=5",
    "SPECREJ_REWARD_REWARDS": json.dumps(_REWARDS),
    "SPECREJ_ORCHESTRATOR_COMPOSITES": _COMPOSITES[1],
    # The default of a quarter of a second is short on a busy machine.
    "SPECREJ_ORCHESTRATOR_CACHE_TIMEOUT_S": "2",
}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def toys() -> AsyncIterator[Stack]:
    async with Stack(environment=_SETTINGS) as running:
        yield running
