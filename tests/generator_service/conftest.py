"""Fixtures for engines on tiny models, and for servers with OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
import torch

from generator_service.engine.commands import ReportRate
from generator_service.stock import endpoint, server
from tests.generator_service.completions import Servers, save_tokenizer


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: with tiny products, several threads mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def all_servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    directory = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    async with AsyncExitStack() as resources:
        yield Servers(directory, resources)


@pytest_asyncio.fixture(loop_scope="module")
async def servers(
    all_servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Servers]:
    """Delays are short. Afterwards nothing is left of sessions, and no task has an exception that
    was not retrieved."""
    monkeypatch.setattr(server, "_FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(endpoint, "_PAUSE_S", 0.001)
    monkeypatch.setattr(ReportRate, "_PAUSE_S", 0.0)
    yield all_servers
    await all_servers.check()
    assert not [one.getMessage() for one in caplog.records if one.name == "asyncio"]
