"""How commands end: interrupts, readers that leave, full disks, narrow encodings."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from itertools import product

import pytest

from specrej import contracts as c
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
