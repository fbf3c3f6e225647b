"""`make loadtest-ui`: the forms of Locust's page, on toys."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from deploy.local.stack import Ports, Stack
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
    except httpx2.HTTPError:
        return False
    return True


async def send(url: str, headers: dict[str, str] | None = None, **form: Any) -> Any:
    """The JSON object of a page; a form is posted."""
    async with httpx2.AsyncClient(trust_env=False, timeout=60) as http:
        method = "POST" if form else "GET"
        response = await http.request(method, url, data=form or None, headers=headers)
        return response.raise_for_status().json()


async def test_foreign_forms_are_refused_and_rewards_are_shown(toys: Stack, url: str) -> None:
    """Guards against a page of another site that sends the token and a file to its own host,
    options that have no effect, and answers without what they buy."""
    origin = {"Origin": "http://other.example"}
    for headers in (origin, origin | {"Host": "other.example"}):  # a name of 127.0.0.1
        with pytest.raises(httpx2.HTTPStatusError, match="403"):
            await send(f"{url}/swarm", headers, user_count=1)
    where: dict[str, Any] = {"user_count": 2, "spawn_rate": 2, "host": toys.orchestrator_address}
    options: dict[str, Any] = {"alpha": "0.25", "max_tokens": 25, "n": "4"}
    started = await send(f"{url}/swarm", **where, **options)
    assert started["success"], started

    async def rewards() -> list[dict[str, Any]]:
        (shown,) = (await send(f"{url}/stats/requests"))["extendedStats"]
        return list(shown["data"])

    await until(rewards, every_s=0.2)
    await send(f"{url}/stop", now=1)
    (row,) = await rewards()
    assert (row["algorithm"], row["n"]) == ("speculative-rejection", 4)
    assert 0 < float(row["tokens"]) <= 4 * 25 and 0 < float(row["reward"]) <= 1
