"""`make loadtest-ui`: the forms of Locust's page, on toys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import pytest_asyncio

from deploy.local.stack import Ports, Stack
from specrej import Client
from specrej.security import TENANT_METADATA
from tests.serving import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def url(toys: Stack) -> AsyncIterator[str]:
    """The address of the page; Ctrl-C is its normal end."""
    port = Ports.free().gateway
    command = (sys.executable, "-m", "loadtest", "--host", toys.orchestrator_address)
    process = await asyncio.create_subprocess_exec(
        *command, "--web-port", str(port), stderr=PIPE, stdout=PIPE, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        await until(lambda: answers(url), every_s=0.1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGINT)
        async with asyncio.timeout(60):
            await process.communicate()
    assert process.returncode == 0


async def answers(url: str) -> bool:
    try:
        await send(f"{url}/stats/requests")
    except URLError:
        return False
    return True


async def send(url: str, headers: dict[str, str] | None = None, **form: object) -> Any:
    """The JSON object of a page; a form is posted."""
    data = urlencode(form).encode() if form else None
    opener = build_opener(ProxyHandler({}))
    request = Request(url, data, headers or {})
    with await asyncio.to_thread(opener.open, request, timeout=60) as response:
        return json.load(response)


async def test_forms_of_other_sites_and_bad_values_are_refused(toys: Stack, url: str) -> None:
    """Guards against a page of another site that sends the token and a file to its own host, and
    options that have no effect or no error."""
    origin = {"Origin": "http://other.example"}
    for headers in (origin, origin | {"Host": "other.example"}):  # a name of 127.0.0.1
        with pytest.raises(HTTPError, match="403"):
            await send(f"{url}/swarm", headers, user_count=1)
    bad = await send(f"{url}/swarm", alpha="2", max_tokens="x")
    assert not bad["success"]
    assert "alpha: must be a number, 0 to 0.999" in bad["message"]
    assert "max_tokens: must be a number" in bad["message"]
    where: dict[str, Any] = {"user_count": 2, "spawn_rate": 2, "host": toys.orchestrator_address}
    options: dict[str, Any] = {"alpha": "0.25", "max_tokens": 24, "n": "4", "tenants": "acme=1"}
    started = await send(f"{url}/swarm", **where, **options)
    assert started["success"], started

    async def has_answers() -> bool:
        return bool((await send(f"{url}/stats/requests"))["total_rps"])

    await until(has_answers, every_s=0.2)
    await send(f"{url}/stop", now=1)
    async with Client(toys.orchestrator_address) as client:
        records = await client.records(metadata=[(TENANT_METADATA, "acme")])
    assert {record.max_tokens for record in records} == {24}
    assert {record.selection.alpha for record in records} == {0.25}
