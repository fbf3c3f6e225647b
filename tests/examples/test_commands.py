"""The one command of each example, with services of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import httpx
import pytest

from deploy.local.stack import Ports
from examples.__main__ import COMMANDS
from tests.examples.conftest import EXAMPLES

# Rewards of the names that the examples use, beside the function of `coding`.
TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy:",
    "SPECREJ_REWARD_REWARDS": json.dumps([{"name": "relevance", "kind": "toy"}]),
}
ARGUMENTS = {
    "batch": ("--n", "2"),
    "coding": ("--n", "2"),
    "fastapi_app": ("--port", str(Ports.free().gateway)),
    "preferences": ("--n", "2", "--min-margin", "0"),
    "rag": ("--veto-below", "-100"),
}
OUTPUT = {
    "batch": "12/12",
    "coding": "of the unit tests pass",
    "fastapi_app": "Uvicorn running",
    "preferences": "of 8 prompts in build/examples/pairs.jsonl",
    "rag": "passages:",
}


@pytest.mark.parametrize("name", COMMANDS)
async def test_the_command(name: str, tmp_path: Path) -> None:
    """Guards against a command that finds no file, service or reward, and never ends."""
    (tmp_path / "examples").symlink_to(EXAMPLES)  # so that the output is not the checkout's
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples", name, *ARGUMENTS[name]),
        cwd=tmp_path,
        env={**os.environ, **TOYS, "PYTHONPATH": str(EXAMPLES.parent)},
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(60):
            if name == "fastapi_app":
                await _answer(int(ARGUMENTS[name][1]))
                os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = (out + err).decode()
    # A toy writes no code that passes.
    assert process.returncode == (1 if name == "coding" else 0), text
    assert OUTPUT[name] in text and "everything is stopped" in text, text


async def _answer(port: int) -> None:
    """One request, as soon as the app listens."""
    question = {"text": "Why is the sky blue?", "n": 2, "max_tokens": 8}
    async with httpx.AsyncClient(timeout=30) as http:
        while True:
            try:
                response = await http.post(f"http://127.0.0.1:{port}/answer", json=question)
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
            else:
                break
    assert response.status_code == 200 and response.json()["text"], response.text
