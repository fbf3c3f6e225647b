"""Programs of other languages as subprocesses."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from deploy.local.stack import Stack
from tests.serving import until_slots_are_free

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "clients"


async def run(*command: str | Path, folder: Path, bound_s: float = 120, **environment: str) -> str:
    """The output of a command in `folder`; an AssertionError with it if the command fails."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), bound_s)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def wait_for_free_slots(stack: Stack) -> None:
    """Less time than a request of the tests takes that no client cancels."""
    await until_slots_are_free(stack.generator_address, bound_s=10)


async def generate(language: str, output: Path) -> None:
    """Generate the stubs of a language with the plugins that are installed."""
    template = CLIENTS / language / "buf.gen.yaml"
    buf = Path(sys.executable).with_name("buf")
    await run(buf, "generate", "--template", template, "--output", output, folder=ROOT)
