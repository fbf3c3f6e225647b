"""The command line as a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process

from tests.programs import Outcome


async def start(*arguments: str, **environment: str) -> Process:
    return await start_writing_to(PIPE, *arguments, **environment)


async def start_writing_to(stdout: int, *arguments: str, **environment: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specrej.client.cli", *arguments),
        env={**os.environ, **environment},
        stdin=PIPE,
        stdout=stdout,
        stderr=PIPE,
    )


async def finish(process: Process) -> Outcome:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


async def run(*arguments: str, **environment: str) -> Outcome:
    return await finish(await start(*arguments, **environment))
