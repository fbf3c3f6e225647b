"""A real Chromium, controlled through chromedriver by the WebDriver protocol."""

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
        """Show a file on a screen of that size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        await _send(f"{self._url}/goog/cdp/execute", command)
        await _send(f"{self._url}/url", {"url": path.as_uri()})

    async def prefer(self, scheme: str) -> None:
        """Set the color scheme that pages should use: "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        await _send(f"{self._url}/goog/cdp/execute", command)

    async def evaluate(self, script: str) -> Any:
        """The value that the script returns."""
        return await _send(f"{self._url}/execute/sync", {"script": script, "args": []})

    async def log(self) -> list[Any]:
        """The browser's log entries since the last call."""
        entries: list[Any] = await _send(f"{self._url}/se/log", {"type": "browser"})
        return entries


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Page]:
    """Chromium with a profile of its own, for as long as the context."""
    process, port = await _started()
    try:
        base = f"http://127.0.0.1:{port}/session"
        chrome = {
            "browserName": "chrome",
            "goog:chromeOptions": {
                "binary": CHROMIUM,
                "args": [*_ARGUMENTS, f"--user-data-dir={profile}"],
            },
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = await _send(base, {"capabilities": {"alwaysMatch": chrome}})
        try:
            yield Page(f"{base}/{session['sessionId']}")
        finally:
            await _send(f"{base}/{session['sessionId']}", None, "DELETE")
    finally:
        process.terminate()
        await process.communicate()


async def _started() -> tuple[asyncio.subprocess.Process, int]:
    """A driver and its port. It ends at once where the port that it picks for IPv4 is another
    process's for IPv6."""
    for _ in range(5):
        process = await asyncio.create_subprocess_exec(
            str(DRIVER), "--port=0", stdout=asyncio.subprocess.PIPE
        )
        if port := await _port(process):
            return process, port
        await process.communicate()
    raise AssertionError("chromedriver ended at once, five times")


async def _port(process: asyncio.subprocess.Process) -> int:
    """From the line "... was started successfully on port 12345."; 0: the process has ended."""
    assert process.stdout
    async with asyncio.timeout(30):
        async for line in process.stdout:
            if b"successfully on port" in line:
                return int(line.decode().strip().rstrip(".").rpartition(" ")[2])
    return 0


async def _send(url: str, body: Any, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    # No proxy: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with await asyncio.to_thread(opener.open, request, timeout=60) as response:
        return json.load(response)["value"]
