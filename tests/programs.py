"""Programs that end by themselves: as subprocesses, and in this process."""

from __future__ import annotations

import asyncio
import io
import os
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Outcome(NamedTuple):
    """Of a command: its exit code, and what it prints."""

    returncode: int
    stdout: str
    stderr: str


async def run(
    *command: str | Path, folder: Path = ROOT, bound_s: float = 120, **environment: str
) -> str:
    """The stdout of a command in `folder`; an AssertionError with its output if it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env={**os.environ, **environment}, stdout=PIPE, stderr=PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), bound_s)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, (output + errors).decode()
    return output.decode()


def in_process(main: Callable[..., object], *arguments: Any) -> Outcome:
    """The outcome of a command's main function."""
    code: Any = 0
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            main(*arguments)
        except SystemExit as ended:
            code = ended.code or 0
    return Outcome(code, output.getvalue(), errors.getvalue())
