"""The load tests' commands, as processes of their own."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOCUST = str(Path(sys.executable).parent / "locust")
_PATIENCE_S = 120


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    def rows(self, kind: str) -> dict[str, Any]:
        """Locust's rows of that type, by name."""
        return {row["name"]: row for row in json.loads(self.out) if row["method"] == kind}


async def locust(*arguments: str, file: str = "locustfile") -> Ended:
    """Locust from beginning to end."""
    return await ended(await start_locust(*arguments, file=file))


async def start_locust(*arguments: str, file: str = "locustfile") -> Process:
    """Locust without its browser page."""
    shared = ("--headless", "--json", "--stop-timeout", "30")
    return await _start(_LOCUST, "-f", f"loadtest/{file}.py", *shared, *arguments)


async def start_sweep(*arguments: str) -> Process:
    """`make latency-vs-n`."""
    return await _start(sys.executable, "-m", "loadtest.sweep", *arguments)


async def ended(process: Process) -> Ended:
    """Wait for it."""
    out, err = await asyncio.wait_for(process.communicate(), _PATIENCE_S)
    return Ended(process.returncode or 0, out.decode(), err.decode())


async def _start(*command: str) -> Process:
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
