"""The process: what ends with it, and what ends in it by itself."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from generator_service.__main__ import _load
from generator_service.settings import GeneratorSettings
from specrej.channel import open_channel
from specrej.v1 import generator_pb2_grpc
from tests.reward_service.tiny import make_config, make_tokenizer, save_language_model
from tests.serving import failure_of

START_S = 60


@asynccontextmanager
async def _generator(*arguments: str) -> AsyncIterator[str]:
    """The address of a toy that serves."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "generator_service", "--port", "0", "--model", "toy", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        address = ""
        async with asyncio.timeout(START_S):
            while not (line := await process.stderr.readline()).rstrip().endswith(b"serving"):
                assert line, "ended before it served"
                if found := re.search(r"listening on (\S+)", line.decode()):
                    address = found[1]
        yield address
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_session_without_a_deadline_has_the_servers() -> None:
    """Guards against sessions that nothing bounds but their peer's silence."""
    async with (
        _generator("--deadline-s", "0.2") as address,
        open_channel(address, retries=False) as channel,
    ):
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        call = stub.Session()
        async with asyncio.timeout(START_S):
            error = await failure_of(call.read)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _engines() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "engine"}


async def test_the_engine_ends_with_the_service(tmp_path: Path) -> None:
    """Guards the exit code: an interpreter that ends under a step in torch aborts."""
    save_language_model(tmp_path, make_config("llama", None), make_tokenizer(None))
    others = _engines()
    async with AsyncExitStack() as resources:
        await _load(GeneratorSettings(model=str(tmp_path), kv_slots=1000), resources)
        assert len(_engines() - others) == 1
    assert not _engines() - others
