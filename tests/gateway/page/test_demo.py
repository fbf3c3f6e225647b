"""`specrej demo --hold`: the address of the page that replays its request."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.gateway.conftest import TOYS


def loaded(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        return response.read()


@asynccontextmanager
async def running(*command: str, end: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command on toys; on Ctrl-C it prints `end` and stops."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.local", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **TOYS, "COLUMNS": "200"},
    )
    try:
        async with asyncio.timeout(90):
            yield process
            process.send_signal(signal.SIGINT)
            rest = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert end in rest


async def printed(process: asyncio.subprocess.Process, pattern: str) -> tuple[str, ...]:
    """The groups of the first line that matches."""
    assert process.stdout
    text = ""
    while not (match := re.search(pattern, text)):
        line = await process.stdout.readline()
        assert line, text
        text += line.decode()
    return match.groups()


async def test_the_demo_prints_the_address_of_its_replay() -> None:
    """Guards against an address of nothing, and a demo that never ends."""
    async with running("demo", "--hold", end="everything is stopped") as process:
        base, request_id = await printed(process, r"(http://\S+)/#record=([0-9a-f]{32})")
        assert b"specrej-race" in await asyncio.to_thread(loaded, f"{base}/")
        url = f"{base}/v1/specrej/records/{request_id}"
        record = json.loads(await asyncio.to_thread(loaded, url))
        assert (record["outcome"], record["n"]) == ("OK", 32) and record["rounds"]
