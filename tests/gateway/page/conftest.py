"""One browser for all tests of the page, on the stack of toys that the gateway's tests have."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from specrej.client import Client
from tests.browser import CHROMIUM, DRIVER, browser
from tests.gateway.page.window import Window
from tests.programs import ROOT
from tests.serving import need as need

AXE = ROOT / ".tools" / "node" / "node_modules" / "axe-core" / "axe.min.js"  # make node-client


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def window(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Window]:
    """The page in a browser."""
    need(CHROMIUM, "chromium")
    need(DRIVER, "chromedriver")
    async with browser(tmp_path_factory.mktemp("profile")) as page:
        yield Window(page, stack.gateway_url)


@pytest_asyncio.fixture(loop_scope="session")
async def fresh(window: Window) -> AsyncIterator[Window]:
    """The page, just loaded in a wide window of light colors; at the end its console is empty, and
    it has called no other origin."""
    await window.page.prefer("light")
    await window.load()
    await window.page.log("performance")  # of the browser's first page
    yield window
    await window.check_quiet()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[Client]:
    """The orchestrator, past the page."""
    async with Client(stack.orchestrator_address) as client:
        yield client
