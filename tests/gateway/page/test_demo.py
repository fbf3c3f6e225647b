"""`specrej demo --hold`: the address of the page."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.gateway.conftest import TOYS
from tests.gateway.gateways import get
from tests.programs import started


@pytest.mark.long
async def test_the_demo_prints_the_address_of_the_page() -> None:
    """Guards against an address of nothing, and a demo that never ends."""
    command = (sys.executable, "-m", "specrej.client.cli", "demo", "--hold")
    page = r"page\s+http://\S+:(\d+)/"
    async with started(*command, until=page, **TOYS, COLUMNS="200") as (process, match):
        assert b"specrej-race" in (await get(int(match[1]), "/"))[2]
        process.send_signal(signal.SIGINT)
        rest, _ = await process.communicate()
    assert process.returncode == 0
    assert b"everything is stopped" in rest
