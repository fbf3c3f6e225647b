"""Programs that end by themselves: as subprocesses, and in this process."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Outcome(NamedTuple):
    """Of a command: its exit code, and what it prints."""

    returncode: int
    stdout: str
    stderr: str


async def outcome_of(
    *command: str | Path, folder: Path = ROOT, bound_s: float = 240, **environment: str
) -> Outcome:
    """The outcome of a command; an AssertionError, with its output and stacks, if it has none."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    ending = asyncio.ensure_future(process.communicate())
    try:
        is_late = not (await asyncio.wait({ending}, timeout=bound_s))[0]
    finally:
        for number in (signal.SIGABRT, signal.SIGKILL):
            if not ending.done():
                os.killpg(process.pid, number)  # also what holds its pipes open
                await asyncio.wait({ending}, timeout=2)
    output, errors = await ending
    assert not is_late, f"no end within {bound_s:g} s: {output.decode()}{errors.decode()}"
    assert process.returncode is not None
    return Outcome(process.returncode, output.decode(), errors.decode())


async def run(*command: str | Path, **options: Any) -> str:
    """The stdout of a command; an AssertionError with its output if it fails."""
    code, output, errors = await outcome_of(*command, **options)
    assert code == 0, output + errors
    return output


@asynccontextmanager
async def started(
    *command: str | Path, until: str, **environment: str
) -> AsyncIterator[tuple[Process, re.Match[str]]]:
    """A process that has printed what matches `until`, and the match; it is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env={**os.environ, **environment}, stdout=PIPE, stderr=STDOUT
    )
    assert process.stdout
    text = ""
    try:
        async with asyncio.timeout(120):
            while not (match := re.search(until, text)):
                line = await process.stdout.readline()
                assert line, text
                text += line.decode()
        yield process, match
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def in_process(main: Callable[..., object], *arguments: Any) -> Outcome:
    """The outcome of a command's main function."""
    code: Any = 0
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            main(*arguments)
        except SystemExit as ended:
            code = ended.code or 0
            if isinstance(code, str):  # as the interpreter does
                print(code, file=errors)
                code = 1
    return Outcome(code, output.getvalue(), errors.getvalue())
