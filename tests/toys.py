"""Settings of toys, and one stack of them for all tests of commands that need an address only."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest_asyncio

from deploy.local.stack import Stack
from tests.programs import ROOT

# Environment variables of services with toys alone.
TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=10",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
}
# The names of the embedded rewards, which documents and examples use.
_NAMES = ("toy", "relevance", "harmless")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def toys() -> AsyncIterator[Stack]:
    async with Stack(environment=_settings()) as running:
        yield running


def _settings() -> dict[str, str]:
    """With the rewards of the examples."""
    rewards: list[dict[str, object]] = [{"name": name, "kind": "toy"} for name in _NAMES]
    coding = json.loads((ROOT / "examples/coding/rewards.json").read_text("utf-8"))
    # Also where there is no sandbox.
    rewards += [{**spec, "allow_unsandboxed": True} for spec in coding]
    rewards.append({"name": "schema", "kind": "schema"})
    return {
        # A request for 4,000 tokens takes longer than any test waits.
        "SPECREJ_GENERATOR_MODEL": "toy:step_ms=5",
        "SPECREJ_REWARD_REWARDS": json.dumps(rewards),
        # The default of a quarter of a second is short on a busy machine.
        "SPECREJ_ORCHESTRATOR_CACHE_TIMEOUT_S": "2",
    }
