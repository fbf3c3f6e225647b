"""The process: its deadline, its message when it cannot start, and threads that end with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from generator_service.__main__ import _serve, main, open_generator
from generator_service.loading import engine_of, vllm_fingerprint
from generator_service.settings import GeneratorSettings
from specrej.backend.v1 import generator_pb2_grpc
from specrej.client.channel import open_channel
from specrej.contracts import Prompt, Sampling, SessionSpec
from specrej.contracts.errors import InvalidRequest
from specrej.server.serving import Server
from tests.reward_service.tiny import save_language_model
from tests.serving import failure_of, until


async def test_a_session_without_a_deadline_has_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[Server] = []

    def recorded(*arguments: Any, **options: Any) -> Server:
        servers.append(Server(*arguments, **options))
        return servers[0]

    monkeypatch.setattr("generator_service.__main__.Server", recorded)
    serving = asyncio.create_task(
        _serve(GeneratorSettings(model="toy", port=0, deadline_s=0.2, grace_s=0.01))
    )
    await until(lambda: bool(servers) and servers[0].port > 0)
    async with open_channel(f"127.0.0.1:{servers[0].port}") as channel:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)

        async def ends_by_deadline() -> bool:  # UNAVAILABLE while the toy loads
            error = await failure_of(stub.Session().read)
            return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        await until(ends_by_deadline)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving


async def test_a_shorter_context_is_a_limit(tmp_path: Path) -> None:
    """Also guards the exit code: an interpreter that ends during a step in torch aborts."""
    save_language_model(tmp_path)
    others = engine_threads()
    settings = GeneratorSettings(model=str(tmp_path), kv_slots=1000, context_tokens=40)
    async with AsyncExitStack() as resources:
        generator, _ = await open_generator(settings, resources)
        assert len(engine_threads() - others) == 1
        assert (await generator.describe()).context_tokens == 40
        spec = SessionSpec(Prompt(text="Hello"), 1, Sampling(max_tokens=40), 1)
        with pytest.raises(InvalidRequest, match="exceed the context of 40"):
            async with generator.open(spec):
                pass
    assert not engine_threads() - others


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "engine"}


@pytest.mark.parametrize(
    ("has_cuda", "device", "expected"),
    [(False, "auto", "own"), (True, "cpu", "own"), (True, "auto", "vllm"), (True, "cuda", "vllm")],
)
def test_the_device_chooses_the_engine(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, device: str, expected: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert engine_of(GeneratorSettings(device=device)) == expected


@pytest.mark.parametrize(
    ("has_cuda", "flags", "message"),
    [
        (True, (), "the engine on CUDA is vLLM, .*pip install 'specrej-server\\[models,vllm\\]'"),
        (False, ("--model", "tests"), "no model in tests"),
    ],
)
def test_what_prevents_a_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, flags: tuple[str, ...], message: str
) -> None:
    """Guards against a production service on an engine that is not made for GPUs, and a traceback
    of the event loop that hides the reason."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["generator", "--port", "0", *flags])
    with pytest.raises(SystemExit, match=f"^generator: {message}[^\n]*$"):
        main()


def test_vllm_options_are_in_the_fingerprint(tmp_path: Path) -> None:
    """Guards against generators with different tokens that replace each other."""
    (tmp_path / "config.json").write_text("{}")

    def of(**options: object) -> str:
        settings = GeneratorSettings(engine="vllm", model=str(tmp_path), vllm_options=options)
        return vllm_fingerprint(settings, "bfloat16", "1")

    assert of(quantization="fp8") == of(quantization="fp8")
    assert len({of(), of(quantization="fp8"), of(kv_cache_dtype="fp8")}) == 3


def test_speculative_decoding_is_refused() -> None:
    """Guards against tokens that depend on what a draft model proposes."""
    with pytest.raises(ValidationError, match="speculative_config cannot be used"):
        GeneratorSettings(vllm_options={"speculative_config": {"model": "ngram"}})
