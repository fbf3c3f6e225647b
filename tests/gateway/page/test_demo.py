"""`specrej demo --hold`: the address of the page that replays its request."""

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
async def test_the_demo_prints_the_address_of_its_replay() -> None:
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
            while not (match := re.search(r"http://\S+:(\d+)/#record=([0-9a-f]{32})", text)):
                line = await process.stdout.readline()
                assert line, text
                text += line.decode()
            port, request_id = int(match[1]), match[2]
            assert b"specrej-race" in (await get(port, "/"))[2]
            _, _, record = await get(port, f"/v1/specrej/records/{request_id}")
            assert (record["outcome"], record["n"]) == ("OK", 32) and record["rounds"]
            process.send_signal(signal.SIGINT)
            rest, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert b"everything is stopped" in rest
