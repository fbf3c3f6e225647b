"""`specrej demo --hold`: its page replays the request that it made."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import urllib.request
from typing import Any

from tests.gateway.conftest import TOYS


def loaded(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        return response.read()


async def test_the_demo_prints_the_address_of_its_replay() -> None:
    """Guards against an address of nothing, and a demo that never ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.local", "demo", "--hold"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **TOYS, "COLUMNS": "200"},
    )
    assert process.stdout
    try:
        async with asyncio.timeout(90):
            text = ""
            while not (found := re.search(r"(http://\S+)/#record=([0-9a-f]{32})", text)):
                line = await process.stdout.readline()
                assert line, text
                text += line.decode()
            base, request_id = found.groups()
            assert b"specrej-race" in await asyncio.to_thread(loaded, f"{base}/")
            url = f"{base}/v1/specrej/records/{request_id}"
            record = json.loads(await asyncio.to_thread(loaded, url))
            assert (record["outcome"], record["n"]) == ("OK", 32) and record["rounds"]
            process.send_signal(signal.SIGINT)
            rest = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert "everything is stopped" in rest
