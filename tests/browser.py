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
    "--hide-scrollbars",
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Page:
    """One window."""

    def __init__(self, session_url: str) -> None:
        self._url = session_url

    async def open(self, where: Path | str, width: int, height: int = 900) -> None:
        """Show a file or an address on a screen of that size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.command("Emulation.setDeviceMetricsOverride", size)
        url = where if isinstance(where, str) else where.as_uri()
        await _send(f"{self._url}/url", {"url": url})

    async def prefer(self, scheme: str, **features: str) -> None:
        """Set the color scheme that pages should use, "light" or "dark", and further preferences,
        such as `forced_colors="active"`."""
        named = {"prefers-color-scheme": scheme}
        named |= {name.replace("_", "-"): value for name, value in features.items()}
        chosen = [{"name": name, "value": value} for name, value in named.items()]
        await self.command("Emulation.setEmulatedMedia", {"features": chosen})

    async def evaluate(self, script: str, *arguments: Any) -> Any:
        """The value that the script returns, or that its promise resolves to."""
        body = {"script": script, "args": list(arguments)}
        return await _send(f"{self._url}/execute/sync", body)

    async def press(self, *keys: str) -> None:
        """Press keys one after another; special keys by their code points in WebDriver."""
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": steps}]
        await _send(f"{self._url}/actions", {"actions": actions})

    async def chord(self, held: str, key: str) -> None:
        """Press a key while another one is held."""
        keys = (("keyDown", held), ("keyDown", key), ("keyUp", key), ("keyUp", held))
        steps = [{"type": kind, "value": value} for kind, value in keys]
        actions = [{"type": "key", "id": "keyboard", "actions": steps}]
        await _send(f"{self._url}/actions", {"actions": actions})

    async def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """The result of a command of Chromium's DevTools protocol."""
        body = {"cmd": name, "params": parameters}
        return await _send(f"{self._url}/goog/cdp/execute", body)

    async def log(self, kind: str = "browser") -> list[Any]:
        """The log entries since the last call: of the "browser", or of its "performance"."""
        entries: list[Any] = await _send(f"{self._url}/se/log", {"type": kind})
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
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
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
    """A driver and its port. It ends at once where that is another process's for IPv6."""
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
