"""Locust's page in a real browser, with our users, shapes, options, tables and tab, on toys."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import pytest_asyncio

from deploy.local.stack import Ports, Stack
from specrej import Client
from specrej.security import TENANT_METADATA
from tests.browser import CHROMIUM, DRIVER, Page, browser
from tests.gateway.page.conftest import need
from tests.serving import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ALGORITHMS = ("best-of-n", "speculative-rejection")
STOPPED = "document.body.innerText.includes('STOPPED')"
POINTS = "document.querySelectorAll('#latency-vs-n circle')"


@pytest_asyncio.fixture(loop_scope="session")
async def server(toys: Stack) -> AsyncIterator[tuple[str, Process]]:
    """The address of the page, and the process of `make loadtest-ui`."""
    command = (sys.executable, "-m", "loadtest", "--host", toys.orchestrator_address)
    port = ("--web-port", str(Ports.free().gateway))
    process = await asyncio.create_subprocess_exec(*command, *port, stderr=PIPE)
    assert process.stderr
    try:
        async with asyncio.timeout(60):
            line = (await process.stderr.readline()).decode()
        assert line.startswith("page  http://"), line
        yield line.split()[1], process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.communicate()


async def start(page: Page, **fields: object) -> None:
    """Fill in the form and send it."""
    await page.evaluate(
        """
        for (const [name, value] of Object.entries(arguments[0])) {
          const field = document.querySelector(`form [name=${name}]`);
          const set = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), 'value').set;
          set.call(field, value);
          field.dispatchEvent(new Event('input', { bubbles: true }));
          field.dispatchEvent(new Event('change', { bubbles: true }));
        }
        [...document.querySelectorAll('form button')].at(-1).click();""",
        fields,
    )


async def shown(page: Page, condition: str) -> None:
    """Wait until the expression is true in the page."""
    script = f"return Boolean({condition})"
    try:
        await until(lambda: page.evaluate(script), every_s=0.05)
    except TimeoutError:
        text = await page.evaluate("return document.body.innerText")
        raise AssertionError(f"never: {condition}\n{text}") from None


async def table(page: Page, tab: str) -> list[dict[str, str]]:
    """The rows of the table in a tab, once it has one, by the titles of their columns."""
    found = f"[...document.querySelectorAll('[role=tab]')].find((t) => t.textContent === '{tab}')"
    await shown(page, found)
    await page.evaluate(f"{found}.click();")
    await shown(page, "document.querySelector('tbody tr')")
    rows: list[list[str]] = await page.evaluate(
        """
        return [...document.querySelectorAll('tr')].map(
          (row) => [...row.children].map((cell) => cell.textContent));"""
    )
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


async def watch_pictures(page: Page) -> None:
    """Collect the pictures that the tab shows while the test runs, as `window.drawn`.

    In the page, because a busy machine may not look often enough.
    """
    await page.evaluate(
        f"""
        window.drawn = new Set();
        const look = () => {{
          if ({POINTS}.length && !{STOPPED})
            drawn.add(document.querySelector('#latency-vs-n svg').innerHTML);
        }};
        const changes = {{ childList: true, subtree: true }};
        new MutationObserver(look).observe(document.body, changes);"""
    )


async def check_tables(page: Page) -> None:
    """Answers alone count in the totals; rounds and missed requests have tables of their own."""
    *rows, total = await table(page, "Statistics")
    assert {row["Type"] for row in rows} == {"answer"}
    names = {f"{algorithm} acme n={n}" for algorithm in ALGORITHMS for n in (1, 4)}
    assert {row["Name"] for row in rows} == names
    assert int(total["# Requests"]) == sum(int(row["# Requests"]) for row in rows) > 0
    rounds = await table(page, "Rounds")
    assert {row["Type"] for row in rounds} == {"admitted", "first round", "between rounds"}
    # Only the open loop misses requests.
    assert "missed" in {row["Type"] for row in await table(page, "Late arrivals")}


async def check_forms_of_other_sites(url: str) -> None:
    """A page of another site cannot send the token and a file to its own host."""
    origin = {"Origin": "http://other.example"}
    for headers in (origin, origin | {"Host": "other.example"}):  # a name of 127.0.0.1
        request = Request(f"{url}/swarm", b"user_count=1", headers)
        with pytest.raises(HTTPError, match="403"):
            await asyncio.to_thread(build_opener(ProxyHandler({})).open, request, timeout=60)


async def test_short_test_in_the_page(
    toys: Stack, server: tuple[str, Process], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Guards against totals that count rounds, options that have no effect or no error, a tab
    that is drawn once the test has stopped, or never, and forms of other sites that start a test.
    """
    url, process = server
    await check_forms_of_other_sites(url)
    need(CHROMIUM, "chromium")
    need(DRIVER, "chromedriver")
    async with browser(tmp_path_factory.mktemp("profile")) as page:
        await page.open(url, 1600)
        await shown(page, "document.querySelector('form [name=alpha]')")
        await start(page, alpha="2", maxTokens="x")
        await shown(page, "document.body.innerText.includes('alpha: must be a number, 0 to 0.999')")
        await shown(page, "document.body.innerText.includes('max_tokens: must be a number')")
        await start(
            page,
            shapeClass="Steps",
            userCount="2",
            alpha="0.25",
            maxTokens="24",
            n="1,4",
            stepSeconds="5",
            algorithm="both",
            rate="40",
            maxInFlight="1",
            tenants="acme=1",
        )
        await watch_pictures(page)
        await table(page, "Latency vs N")
        await shown(page, STOPPED)
        assert await page.evaluate("return window.drawn.size") > 1
        await check_tables(page)
        await table(page, "Latency vs N")
        await shown(page, f"{POINTS}.length == 8")
        drawn = await page.evaluate(
            f"return [...{POINTS}].map((e) => [e.dataset.n, e.dataset.field])"
        )
        expected = [[n, field] for n in "14" for field in ("median", "p95")] * len(ALGORITHMS)
        assert sorted(drawn) == sorted(expected)
        assert await page.log() == []
    async with Client(toys.orchestrator_address) as client:
        records = await client.records(metadata=[(TENANT_METADATA, "acme")])
    assert {record.max_tokens for record in records} == {24}
    assert {record.selection.alpha for record in records} <= {0.25, 0.0}  # 0: Best-of-N
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        _, text = await process.communicate()
    assert (process.returncode, text.decode().splitlines()[-1]) == (0, "stopping")
