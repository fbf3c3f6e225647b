"""A real Chromium, spoken to by the WebDriver protocol that chromedriver serves."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Page:
    """One window."""

    def __init__(self, session_url: str) -> None:
        self._url = session_url

    async def open(self, path: Path, width: int, height: int = 900) -> None:
        """Show a file as a screen of that size would, pixels as in CSS."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        await _ask(f"{self._url}/goog/cdp/execute", command)
        await _ask(f"{self._url}/url", {"url": path.as_uri()})

    async def prefer(self, scheme: str) -> None:
        """Ask pages for "light" or "dark", as a user's settings would."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        await _ask(f"{self._url}/goog/cdp/execute", command)

    async def evaluate(self, script: str) -> Any:
        """What the script returns."""
        return await _ask(f"{self._url}/execute/sync", {"script": script, "args": []})

    async def log(self) -> list[Any]:
        """What the browser has logged since it was last asked."""
        found: list[Any] = await _ask(f"{self._url}/se/log", {"type": "browser"})
        return found


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Page]:
    """Chromium with a profile of its own; gone when the context is left."""
    process = await asyncio.create_subprocess_exec(
        str(DRIVER), "--port=0", stdout=asyncio.subprocess.PIPE
    )
    try:
        base = f"http://127.0.0.1:{await _port(process)}/session"
        session = await _ask(base, _capabilities(profile))
        try:
            yield Page(f"{base}/{session['sessionId']}")
        finally:
            await _ask(f"{base}/{session['sessionId']}", None, "DELETE")
    finally:
        process.terminate()
        await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> int:
    """It says "... was started successfully on port 12345."."""
    assert process.stdout
    async with asyncio.timeout(30):
        async for line in process.stdout:
            if b"successfully on port" in line:
                return int(line.decode().strip().rstrip(".").rpartition(" ")[2])
    raise AssertionError("chromedriver ended at once")


def _capabilities(profile: Path) -> dict[str, Any]:
    arguments = [*_ARGUMENTS, f"--user-data-dir={profile}"]
    chrome = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
        "goog:loggingPrefs": {"browser": "ALL"},
    }
    return {"capabilities": {"alwaysMatch": chrome}}


async def _ask(url: str, body: Any, method: str = "POST") -> Any:
    return await asyncio.to_thread(_ask_blocking, url, body, method)


def _ask_blocking(url: str, body: Any, method: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    # Never by a proxy: it is this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)["value"]
