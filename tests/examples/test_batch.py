"""The batch: resume, repair, exit codes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from deploy.local.processes import run_python
from deploy.local.stack import Stack
from examples.__main__ import COMMANDS
from examples.batch import batch
from tests.serving import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTIONS = Path(COMMANDS["batch"][1])
IDS = sorted(question["id"] for question in batch.read_questions(QUESTIONS))


def ids_of(answers: Path) -> list[str]:
    return [json.loads(line)["id"] for line in answers.read_text().splitlines()]


def options(answers: Path, toys: Stack) -> argparse.Namespace:
    return argparse.Namespace(
        questions=QUESTIONS,
        answers=answers,
        address=toys.orchestrator_address,
        concurrency=3,
        n=4,
        timeout=60.0,
    )


async def test_a_killed_batch_continues_where_it_stopped(toys: Stack, tmp_path: Path) -> None:
    """Guards the resume: every id once, answers kept, the half-written line answered again."""
    answers = tmp_path / "answers.jsonl"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, COMMANDS["batch"][0], str(QUESTIONS), str(answers)),
        *("--n", "4", "--concurrency", "1"),
        env={**os.environ, "SPECREJ_ADDRESS": toys.orchestrator_address},
    )
    try:
        await until(lambda: answers.exists() and answers.read_text().count("\n") >= 2)
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 130
    before = answers.read_text()
    assert 2 <= len(ids_of(answers)) < len(IDS)
    missing = next(name for name in IDS if name not in ids_of(answers))
    answers.write_text(f'{before}{{"id": "{missing}", "text": "half')
    assert await batch.run(options(answers, toys)) == 0
    assert answers.read_text().startswith(before)
    assert sorted(ids_of(answers)) == IDS


async def test_failures_set_the_exit_code(tmp_path: Path) -> None:
    """Guards the command: no server, one question, one line of error, exit code 1."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"id": "a", "prompt": "why?"}\n')
    answers = str(tmp_path / "answers.jsonl")
    command = (COMMANDS["batch"][0], str(questions), answers, "--timeout", "0.2")
    assert await run_python(command, "127.0.0.1:1") == 1
