"""The one command of each example; that of `coding`, which has settings, with its own services."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from deploy.local.stack import Ports, Stack
from examples.__main__ import COMMANDS
from tests.examples.conftest import EXAMPLES

pytestmark = pytest.mark.asyncio(loop_scope="session")

ARGUMENTS = {
    "batch": ("--n", "2", "--concurrency", "3"),  # as many as the services take
    "coding": ("--n", "2"),
    "preferences": ("--n", "2", "--min-margin", "0"),
    "rag": ("--veto-below", "-100"),
}
OUTPUT = {
    "batch": "12/12",
    "coding": "no complete block of code",
    "fastapi_app": "Uvicorn running",
    "preferences": "of 8 prompts in build/examples/pairs.jsonl",
    "rag": "passages:",
}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"coding"}))
async def test_the_command(name: str, toys: Stack, tmp_path: Path) -> None:
    """Guards against a command that finds no file or reward, and never ends."""
    (tmp_path / "build" / "examples").mkdir(parents=True)
    arguments = ARGUMENTS.get(name, ("--port", str(Ports.free().gateway)))
    command = (*COMMANDS[name], *arguments)
    text = await _run(name, command, tmp_path, SPECREJ_ADDRESS=toys.orchestrator_address)
    assert OUTPUT[name] in text, text


@pytest.mark.long
async def test_the_command_with_services(tmp_path: Path) -> None:
    """Guards against services without the settings of the example. No code of a toy passes."""
    command = ("-m", "examples", "coding", *ARGUMENTS["coding"])
    toys = {"SPECREJ_GENERATOR_MODEL": "toy:"}
    text = await _run("coding", command, tmp_path, code=1, **toys)
    assert OUTPUT["coding"] in text and "everything is stopped" in text, text


async def _run(
    name: str, command: Sequence[str], folder: Path, *, code: int = 0, **environment: str
) -> str:
    """What the command prints in a folder of its own, so that its output is not the checkout's."""
    (folder / "examples").symlink_to(EXAMPLES)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": str(EXAMPLES.parent)},
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(60):
            if name == "fastapi_app":
                await _answer(int(command[-1]))
                os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = (out + err).decode()
    assert process.returncode == code, text
    return text


async def _answer(port: int) -> None:
    """One answer, as soon as the app listens, and the same as a stream."""
    app = f"http://127.0.0.1:{port}"
    question = {"text": "Why is the sky blue?", "n": 2, "max_tokens": 8}
    async with httpx.AsyncClient(timeout=30) as http:
        while True:
            try:
                response = await http.post(f"{app}/answer", json=question)
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
            else:
                break
    assert response.status_code == 200 and response.json()["text"], response.text
    stream = await http_stream(app, question)
    assert stream.endswith(f'event: done\ndata: {{"score": {response.json()["score"]}}}'), stream


async def http_stream(app: str, question: dict[str, object]) -> str:
    async with httpx.AsyncClient(timeout=30) as http:
        response = await http.post(f"{app}/stream", json=question)
    return response.text.strip().replace("\r", "")
