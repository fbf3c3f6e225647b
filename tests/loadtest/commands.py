"""The load tests' commands as separate processes."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Completed:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def rows(self, kind: str) -> dict[str, Any]:
        """Locust's rows of that type, by name. Worker processes print an empty list."""
        rows = json.loads(self.out.replace("[]", "").strip() or "[]")
        return {row["name"]: row for row in rows if row["method"] == kind}


async def locust(*arguments: str) -> Completed:
    """Run Locust without its browser page, to its end."""
    shared = ("-f", "loadtest/locustfile.py", "--headless", "--json", "--stop-timeout", "30")
    return await completed(await start("locust", *shared, *arguments))


async def latency_vs_n(*arguments: str) -> Completed:
    """Run the command of `make latency-vs-n` to its end."""
    return await completed(await start("loadtest.latency_vs_n", *arguments))


async def start(module: str, *arguments: str) -> Process:
    """Start a module as a program."""
    command = (sys.executable, "-m", module, *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


async def completed(process: Process) -> Completed:
    """Wait for the end of a process."""
    out, err = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    return Completed(process.returncode or 0, out.decode(), err.decode())
