"""How commands end: interrupts, readers that leave, full disks, narrow encodings."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import termios
from asyncio.subprocess import PIPE
from dataclasses import replace
from itertools import product

import pytest

from specrej import contracts as c
from tests.serving import until
from tests.specrej.fakes import EVENTS, ONE, FakeOrchestrator
from tests.specrej.processes import finish, run, start, start_writing_to


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
async def test_an_interrupt_cancels_the_call(
    address: str, orchestrator: FakeOrchestrator, number: signal.Signals, code: int
) -> None:
    """Guards against a traceback on Ctrl-C, and candidates that grow on after it."""
    orchestrator.hangs = True
    process = await start("generate", "why?", "--address", address)
    await asyncio.wait_for(orchestrator.received.wait(), 60)
    process.send_signal(number)
    assert await finish(process) == (code, "", "")
    await asyncio.wait_for(orchestrator.cancelled.wait(), 10)


async def test_a_text_on_stdin_must_be_utf_8(address: str) -> None:
    process = await start("generate", "-", "--address", address, PYTHONIOENCODING="utf-8")
    out, err = await asyncio.wait_for(process.communicate(b"a\xffb"), 60)
    assert (process.returncode, out, err.count(b"\n")) == (2, b"", 1)
    assert err.startswith(b"specrej: stdin: ")


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [*product(("describe --address ADDRESS", "token acme"), ("", "1")), ("--help", "")],
)
async def test_a_reader_that_leaves_is_no_traceback(
    address: str, command: str, unbuffered: str
) -> None:
    """Guards against "Exception ignored", which Python prints if it cannot write at exit."""
    reading, writing = os.pipe()
    os.close(reading)
    words = command.replace("ADDRESS", address).split()
    process = await start_writing_to(writing, *words, PYTHONUNBUFFERED=unbuffered)
    os.close(writing)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert err == b"" or (words[0] == "token" and err.startswith(b"{") and err.count(b"\n") == 1)


async def test_a_full_disk_is_one_line(address: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    process = await start_writing_to(full, "describe", "--address", address, PYTHONUNBUFFERED="")
    os.close(full)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err) == (1, b"specrej: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("redirection", ["2> >(exec true); wait $!", "2>/dev/full", "2>&-"])
async def test_an_answer_is_printed_though_stderr_is_closed(
    address: str, orchestrator: FakeOrchestrator, redirection: str
) -> None:
    orchestrator.events = (*EVENTS[:-1], c.Finished(ONE))
    script = f'exec {redirection}; exec "$0" -m specrej.client.cli generate hi --address "$1"'
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script, sys.executable, address), stdout=PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (0, b"the best\n")


@pytest.mark.parametrize(("flags", "printed"), [((), "\\xfc"), (("--json",), "\\u00fc")])
async def test_an_answer_that_stdout_cannot_encode_is_escaped(
    address: str, orchestrator: FakeOrchestrator, flags: tuple[str, ...], printed: str
) -> None:
    """Guards an answer of minutes against a character."""
    best = replace(ONE.candidates[0], text="\xfc")
    orchestrator.events = (*EVENTS[:-1], c.Finished(replace(ONE, candidates=(best,))))
    command = ("generate", "why?", "--address", address, *flags)
    outcome = await run(*command, PYTHONIOENCODING="ascii")
    assert outcome.returncode == 0 and printed in outcome.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
async def test_a_wait_for_stdin_can_be_interrupted(
    address: str, number: signal.Signals, code: int
) -> None:
    """Guards against a command that only SIGKILL ends."""
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specrej.client.cli", "generate", "-", "--address", address),
            stdin=reading,
            stdout=PIPE,
            stderr=PIPE,
        )
        os.write(writing, b"why?")
        await until(lambda: not any(fcntl.ioctl(writing, termios.FIONREAD, bytes(4))))
        process.send_signal(number)
        ended = await finish(process)
    finally:
        os.close(reading)
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (code, "")
