"""Servers for the tests of clients, and the command line in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc.aio
import pytest

from specrej.client import cli
from tests.serving import listening, serving
from tests.specrej.fakes import FakeOrchestrator

Command = Callable[..., Awaitable[tuple[str, str]]]


@pytest.fixture
def orchestrator() -> FakeOrchestrator:
    return FakeOrchestrator()


@pytest.fixture
async def address(orchestrator: FakeOrchestrator) -> AsyncIterator[str]:
    """Where `orchestrator` listens."""
    async with listening(orchestrator.service()) as bound:
        yield bound


@pytest.fixture
async def channel(orchestrator: FakeOrchestrator) -> AsyncIterator[grpc.aio.Channel]:
    """To a server of its own, with reflection."""
    async with serving(orchestrator.service(), reflection=True) as opened:
        yield opened


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """A command of the command line in this process and event loop: its stdout and stderr.

    It raises the errors of clients; exit codes and signals are tested with processes.
    """
    works: list[Coroutine[Any, Any, None]] = []
    monkeypatch.setattr(cli, "run_to_end", works.append)

    async def run(*arguments: str) -> tuple[str, str]:
        capsys.readouterr()
        cli.main(arguments)
        if works:
            await works.pop()
        output = capsys.readouterr()
        return output.out, output.err

    return run
