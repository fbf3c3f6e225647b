"""`specrej demo --hold`: the address of the page."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT

import pytest

from tests.gateway.conftest import TOYS
from tests.gateway.gateways import get


@pytest.mark.long
async def test_the_demo_prints_the_address_of_the_page() -> None:
    """Guards against an address of nothing, and a demo that never ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specrej.client.cli", "demo", "--hold"),
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, **TOYS, "COLUMNS": "200"},
    )
    assert process.stdout
    text = ""
    try:
        async with asyncio.timeout(90):
            while not (match := re.search(r"page\s+http://\S+:(\d+)/", text)):
                line = await process.stdout.readline()
                assert line, text
                text += line.decode()
            assert b"specrej-race" in (await get(int(match[1]), "/"))[2]
            process.send_signal(signal.SIGINT)
            rest, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert b"everything is stopped" in rest
